"""What ddpcheck costs per step, and per parameter: processor time of one rank with parameters of 1 KB.

python benchmarks/cost_per_parameter.py [--pairs N] [--rounds N] [--parameters N]...

For each setting and each number of parameters, a plain and a watched job train in interleaved blocks. A line is fitted
to the difference: the cost of a step with no parameter, and the cost of each parameter. The difference with one
parameter, in the training thread and at defaults, has a limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from step_time import Case, measure_pair

SETTINGS: tuple[tuple[str, ...], ...] = ((), ("--gradients", "off"), ("--budget", "off"))
PARAMETERS = (1, 10, 100, 1000, 2000)
# Steps of a block: long enough for the clock, and at most a few seconds.
BLOCKS = {1: 200, 10: 200, 100: 100, 1000: 20, 2000: 10}
WARM_UP = {1: 500, 10: 500, 100: 300}
# Microseconds of the training thread per step with one parameter, at defaults.
LIMIT = 120.0


def fit_line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Intercept and slope through (parameters, cost, plain time), weighted so that short steps count as much."""
    weights = [1 / plain**2 for _, _, plain in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    together = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y, _) in zip(weights, points, strict=True))
    slope = together / spread if spread else 0.0
    return mean_y - slope * mean_x, slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--parameters", type=int, action="append", choices=PARAMETERS, help="only these")
    chosen = parser.parse_args()
    fixed_cost = 0.0
    for options in SETTINGS:
        name = " ".join(options) or "defaults"
        points = []
        for count in chosen.parameters or PARAMETERS:
            case = Case(
                f"{count} parameters", "tiny", options,
                ranks=1, parameters=count, steps=BLOCKS[count], warm_up=WARM_UP.get(count, 140),
            )  # fmt: skip
            pairs = [measure_pair(case, chosen.rounds, number % 2 == 1) for number in range(chosen.pairs)]
            plain = 1e6 * statistics.median(pair.plain_processor for pair in pairs)
            watched = 1e6 * statistics.median(pair.watched_processor for pair in pairs)
            thread = 1e6 * statistics.median(pair.watched_thread - pair.plain_thread for pair in pairs)
            if (options, count) == (SETTINGS[0], 1):
                fixed_cost = thread
            points.append((count, watched - plain, plain))
            print(
                f"{name}, {count:,} parameters: {plain:,.0f} us of processor time per step plain, {watched:,.0f} us "
                f"watched, ratio {watched / plain:.2f}; {thread:,.0f} us more in the training thread",
                flush=True,
            )
        fixed, each = fit_line(points)
        print(f"{name}: {fixed:,.0f} us per step and {each:.2f} us per parameter", flush=True)
    if fixed_cost > LIMIT:
        sys.exit(
            f"cost per parameter: {fixed_cost:,.0f} us of the training thread per step, limit {LIMIT:.0f}"
        )


if __name__ == "__main__":
    main()

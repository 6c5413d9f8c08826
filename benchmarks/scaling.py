"""The scaling efficiency that a report states, against the same work on one rank: both under ddpcheck, by turns.

python benchmarks/scaling.py [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "clock_cases.py"
# The work of each rank, by what it does alone; world size; whether the machine can be expected to keep up: with real
# work there are as many ranks as cores, and communication takes cores from it.
CASES: list[tuple[str, str, list[str], int, bool]] = [
    ("even, sleeping", "even", ["even"], 2, True),
    ("even, sleeping", "even", ["even"], 4, True),
    ("one rank late, sleeping", "slow_forward", ["even", "slow_forward_alone"], 2, True),
    ("real work", "computing_large", ["computing_large"], 2, False),
]
MOST_OFF = 0.05


def watch(cases: list[str], world_size: int) -> list[dict[str, Any]]:
    """The table of time of each case."""
    tables = []
    for name in cases:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "run")
            job = [
                sys.executable,
                str(JOB),
                "--cases",
                name,
                "--world-size",
                str(world_size),
                "--steps",
                "60",
            ]
            command = [
                sys.executable,
                "-m",
                "ddpcheck",
                "run",
                "-q",
                "--fail-on",
                "never",
                "--out",
                out,
                "--",
                *job,
            ]
            subprocess.run(command, check=True, capture_output=True)
            report = json.loads((Path(out) / "report.json").read_text())
            tables.append(report["time"][0])
    return tables


def step_of(table: dict[str, Any]) -> float:
    return statistics.mean(row["step"]["mean_us"] for row in table["ranks"])


def compare(
    together: str, alone: list[str], world_size: int, rounds: int
) -> tuple[float, float, float, float]:
    """Milliseconds alone and together, and the efficiency as stated and as measured."""
    ones, steps, stated = [], [], []
    for _ in range(rounds):
        # One rank alone, with the mean of what the ranks do.
        ones.append(statistics.mean(step_of(table) for table in watch(alone, 1)))
        [table] = watch([together], world_size)
        steps.append(step_of(table))
        stated.append(float(table["scaling"]["efficiency"]))
    one, step = statistics.median(ones), statistics.median(steps)
    return one / 1000, step / 1000, statistics.median(stated), one / step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| work | ranks | alone, ms | together, ms | efficiency as stated | as measured | speed-up |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    missed = False
    for title, together, alone, world_size, judged in CASES:
        one, step, stated, measured = compare(together, alone, world_size, options.rounds)
        speed_up = stated * world_size
        print(
            f"| {title} | {world_size} | {one:.1f} | {step:.1f} | {100 * stated:.1f} % | {100 * measured:.1f} % "
            f"| {speed_up:.2f} |",
            flush=True,
        )
        missed = missed or (judged and abs(stated - measured) > MOST_OFF)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

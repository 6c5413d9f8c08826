"""Cost of monitoring a running job in the launcher: polling without new records, and each step of a rank.

Files are made by tests/scale. Ranks of this node are followed by every launcher; those of all nodes by the one that has
rank 0, which reports in the end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ddpcheck.analysis.run_reader import RunReader  # noqa: E402
from tests.scale.generate import STORED_SEED, make_run  # noqa: E402
from tests.scale.plan import Plan  # noqa: E402

TICKS_A_SECOND = 10
LOOKS = 50


def measure(ranks: int, steps: int, host: str) -> tuple[float, float, float]:
    """Microseconds for each step of a rank; milliseconds of a first look, and of one that finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "run", STORED_SEED, Plan(ranks=ranks, steps=steps))
        run = RunReader(Path(folder) / "run", host)
        began = time.process_time()
        run.poll()
        first = time.process_time() - began
        began = time.process_time()
        for _ in range(LOOKS):
            run.poll()
        idle = (time.process_time() - began) / LOOKS
    return first / ranks / steps * 1e6, first * 1e3, idle * 1e3


def main() -> None:
    print(f"{'':>34} {'a step of a rank':>17} {'first look':>11} {'nothing new':>12} {'of a core':>10}")
    for name, ranks, steps, host in (
        ("8 ranks of this node", 8, 300, ""),
        ("512 ranks, 8 of them here", 512, 4, "node0000"),
        ("512 ranks, all of them followed", 512, 4, ""),
    ):
        each, first, idle = measure(ranks, steps, host)
        share = idle / 1e3 * TICKS_A_SECOND
        print(f"{name:>34} {each:14.0f} us {first:8.1f} ms {idle:9.2f} ms {100 * share:8.2f} %", flush=True)


if __name__ == "__main__":
    main()

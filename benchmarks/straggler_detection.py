"""Counts how often DDP402 detects a rank slowed by 20 %, and how often it is raised on a healthy job.

python benchmarks/straggler_detection.py [--times N] [--cases late|even|NAMES] [--busy N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "clock_cases.py"
# By case, the part that the late rank is late in; rank 1, unless the case is about buffers.
LATE = {
    "slow_forward": "forward",
    "slow_backward": "backward",
    "slow_data": "data",
    "slow_data_workers": "data",
}
EVEN = dict.fromkeys(
    ("even", "even_with_pauses", "computing_small", "computing_large", "computing_on_threads"), ""
)
# Real work with more on one rank: detected where each rank has its own core.
OTHERS = {"computing_slowly": "forward"}
CASES = {**LATE, **EVEN, **OTHERS}
LATE_RANK = 1


def findings(names: list[str], world_size: int, scale: float, out: Path) -> list[list[dict[str, Any]]]:
    """What DDP402 said of each case, as one run with an attempt for each."""
    job = [str(JOB), "--cases", ",".join(names), "--world-size", str(world_size), "--scale", str(scale)]
    watch = ["-m", "ddpcheck", "run", "-q", "--fail-on", "never", "--out", str(out), "--", sys.executable]
    subprocess.run([sys.executable, *watch, *job], check=True, capture_output=True)
    report = json.loads((out / "report.json").read_text())
    said = [found for found in report["findings"] if found["code"] == "DDP402"]
    return [[each for each in said if each["attempt"] == number] for number in range(len(names))]


def judged(name: str, said: list[dict[str, Any]]) -> str:
    """`named` and `silent` are right for late and for sound jobs; `note` blames a lack of processors."""
    if not said:
        return "silent"
    [each] = said
    if each["severity"] == "note":
        return "note"
    right = (each["ranks"], each["stage"]) == ([LATE_RANK], CASES[name])
    return "named" if right else "wrong"


def burn() -> None:
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other programs that want the cores."""
    burning = [multiprocessing.Process(target=burn, daemon=True) for _ in range(processes)]
    for process in burning:
        process.start()
    try:
        yield
    finally:
        for process in burning:
            process.terminate()


def trials(names: list[str], options: argparse.Namespace) -> Counter[tuple[str, int, str]]:
    counts: Counter[tuple[str, int, str]] = Counter()
    for number in range(options.times):
        for world_size in options.world_sizes:
            with tempfile.TemporaryDirectory() as temporary:
                folder = options.keep or Path(temporary)
                out = folder / f"world-{world_size}-busy-{options.busy}-{number}"
                for name, said in zip(names, findings(names, world_size, options.scale, out), strict=True):
                    counts[name, world_size, judged(name, said)] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--cases", default="late", help="late, even, or names separated by commas")
    parser.add_argument("--world-sizes", type=lambda said: [int(n) for n in said.split(",")], default=[2, 4])
    parser.add_argument("--scale", type=float, default=1.0, help="sleep so many times as long")
    parser.add_argument(
        "--busy", type=int, default=0, help="so many programs that want a core beside the job"
    )
    parser.add_argument("--first", action="store_true", help="ranks before other programs, where allowed")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    if options.first:
        os.environ["JOB_FIRST"] = "1"
    names = {"late": [*LATE], "even": [*EVEN]}.get(options.cases) or options.cases.split(",")
    with busy(options.busy):
        counts = trials(names, options)
    print("| case | ranks | " + " | ".join(("named", "silent", "note", "wrong")) + " |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in names:
        for world_size in options.world_sizes:
            row = [counts[name, world_size, verdict] for verdict in ("named", "silent", "note", "wrong")]
            print(f"| {name} | {world_size} | " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()

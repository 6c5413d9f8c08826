"""Compares the scaling efficiency in the report with the same work on one rank, interleaved.

python benchmarks/scaling_efficiency.py [--rounds N] [--case N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "clock_cases.py"
MOST_OFF = 0.05


@dataclass(frozen=True)
class Case:
    """Jobs of `tests/jobs/clock_cases.py`: several ranks together, and what each kind of rank does, alone."""

    title: str
    together: str
    alone: tuple[str, ...]
    ranks: int
    # Whether the statement must hold: not where ranks take cores, cache and memory from each other.
    judged: bool = True


# Ranks keep to a core of their own, where there are enough; those that sleep do not need one.
CASES = (
    Case("even, sleeping", "even", ("even",), 2),
    Case("even, sleeping", "even", ("even",), 4),
    Case("one rank late, sleeping", "slow_forward", ("even", "slow_forward_alone"), 2),
    Case("real work, batches of 512", "computing_much", ("computing_much",), 2, judged=False),
    Case("real work, batches of 64", "computing_large", ("computing_large",), 2, judged=False),
)


def watch(name: str, ranks: int) -> dict[str, Any]:
    """The table of time of a job."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["run", "-q", "--fail-on", "never", "--out", str(out), "--"]
        job = [str(JOB), "--cases", name, "--world-size", str(ranks), "--steps", "60"]
        command = [sys.executable, "-m", "ddpcheck", *options, sys.executable, *job]
        environment = {**os.environ, "JOB_PINNED": "1", "JOB_FIRST": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        [table] = json.loads((out / "report.json").read_text())["time"]
        return dict(table)


def step_of(table: dict[str, Any]) -> float:
    return statistics.mean(row["step"]["mean_us"] for row in table["ranks"])


def compare(case: Case, rounds: int) -> tuple[float, float, float, float]:
    """Milliseconds alone and together, and the efficiency as stated and as measured."""
    ones, steps, stated = [], [], []
    for _ in range(rounds):
        # One rank alone, with the mean of what the ranks do.
        ones.append(statistics.mean(step_of(watch(name, 1)) for name in case.alone))
        table = watch(case.together, case.ranks)
        steps.append(step_of(table))
        stated.append(float(table["scaling"]["efficiency"]))
    one, step = statistics.median(ones), statistics.median(steps)
    return one / 1000, step / 1000, statistics.median(stated), one / step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="this one only, counted from 0")
    options = parser.parse_args()
    print("| work | ranks | alone, ms | together, ms | efficiency as stated | as measured | speed-up |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    missed = False
    for number, case in enumerate(CASES):
        if options.case not in (None, number):
            continue
        one, step, stated, measured = compare(case, options.rounds)
        print(
            f"| {case.title} | {case.ranks} | {one:.1f} | {step:.1f} | {100 * stated:.1f} % "
            f"| {100 * measured:.1f} % | {stated * case.ranks:.2f} |",
            flush=True,
        )
        missed = missed or (case.judged and abs(stated - measured) > MOST_OFF)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

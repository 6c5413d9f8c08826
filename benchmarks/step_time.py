"""Step time with and without ddpcheck, side by side: two identical jobs that train in turns, block by block.

python benchmarks/step_time.py [--pairs N] [--rounds N] [--model gpt|mlp]

Two processes that do the same thing may differ by a tenth for as long as they live, by where their memory came to lie.
So several pairs of jobs are started, and for comparison pairs of which neither is watched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

JOB = Path(__file__).with_name("step_job.py")
RANKS = 2
# Buckets are rebuilt, memory is touched, and gradients have been sketched at each of the first steps.
WARM_UP = 10
STEPS_A_BLOCK = {"gpt": 2, "mlp": 10}
# Model, options of `ddpcheck run`, the highest ratio that is acceptable; None: shown beside the others.
CASES: list[tuple[str, list[str] | None, float | None]] = [
    ("gpt", [], 1.05),
    ("gpt", ["--gradients", "off"], 1.03),
    ("mlp", None, None),
    ("mlp", [], 1.10),
    ("mlp", ["--sketch-every", "20"], None),
    ("mlp", ["--gradients", "off"], 1.10),
]


class Job:
    """One of the two jobs, trained by orders through named pipes."""

    def __init__(self, folder: Path, model: str, options: list[str] | None) -> None:
        self.pipes = folder / "pipe"
        for rank in range(RANKS):
            os.mkfifo(f"{self.pipes}.in.{rank}")
            os.mkfifo(f"{self.pipes}.out.{rank}")
        store = f"file://{folder / 'store'}"
        command = [sys.executable, str(JOB), "--model", model, "--store", store, "--pipes", str(self.pipes)]
        if options is not None:
            command = [
                sys.executable,
                "-m",
                "ddpcheck",
                "run",
                "-q",
                *options,
                "--out",
                str(folder / "run"),
                "--",
                *command,
            ]
        self.process = subprocess.Popen(command)
        self.open_pipes = contextlib.ExitStack()
        self.orders = [self._open(f"{self.pipes}.in.{rank}", "w") for rank in range(RANKS)]
        self.answers = [self._open(f"{self.pipes}.out.{rank}", "r") for rank in range(RANKS)]

    def _open(self, path: str, mode: str) -> IO[str]:
        return self.open_pipes.enter_context(open(path, mode))

    def train(self, steps: int) -> tuple[float, float]:
        """For a block of steps, seconds on the slower rank, and processor time of all ranks."""
        for order in self.orders:
            print(steps, file=order, flush=True)
        told = [tuple(map(float, answer.readline().split())) for answer in self.answers]
        return max(wall for wall, _ in told), sum(work for _, work in told)

    def end(self) -> int:
        self.open_pipes.close()
        return self.process.wait()


def measure(model: str, options: list[str] | None, pairs: int, rounds: int) -> float:
    """The median over pairs of jobs of how much longer the second takes; without options neither is watched."""
    found = [ratios_of_a_pair(model, options, rounds, number % 2 == 1) for number in range(pairs)]
    wall = statistics.median(wall for wall, _ in found)
    work = statistics.median(work for _, work in found)
    what = f"{model}, neither watched" if options is None else " ".join([model, *options])
    each = ", ".join(f"{wall:.3f}" for wall, _ in sorted(found))
    print(f"{what}: ratio {wall:.3f} of {pairs} pairs ({each}), processor time {work:.3f}", flush=True)
    return wall


def ratios_of_a_pair(
    model: str, options: list[str] | None, rounds: int, watched_first: bool
) -> tuple[float, float]:
    """Of time by the clock and of the processor."""
    steps = STEPS_A_BLOCK[model]
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as watched_folder:
        folders = {False: Path(plain_folder), True: Path(watched_folder)}
        order = (watched_first, not watched_first)
        jobs = {watched: Job(folders[watched], model, options if watched else None) for watched in order}
        for job in jobs.values():
            job.train(WARM_UP)
        blocks = []
        for number in range(rounds):
            # Who goes first changes, so that neither always finds the machine as the other left it.
            turn = order if number % 2 else order[::-1]
            blocks.append({watched: jobs[watched].train(steps) for watched in turn})
        ended = [job.end() for job in jobs.values()]
        if any(ended):
            sys.exit("a job failed")
    wall, work = (statistics.median(block[True][of] / block[False][of] for block in blocks) for of in (0, 1))
    return wall, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=6, help="blocks of steps that each job of a pair trains"
    )
    parser.add_argument("--model", choices=STEPS_A_BLOCK, action="append")
    chosen = parser.parse_args()
    missed = []
    for model, options, limit in CASES:
        if chosen.model and model not in chosen.model:
            continue
        ratio = measure(model, options, chosen.pairs, chosen.rounds)
        if limit is not None and ratio > limit:
            missed.append(f"{' '.join([model, *(options or [])])} is over {limit}")
    if missed:
        sys.exit("step time: " + ", ".join(missed))


if __name__ == "__main__":
    main()

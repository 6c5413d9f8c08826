"""Step time with and without ddpcheck, side by side: two identical jobs that train in turns, block by block.

python benchmarks/step_time.py [--rounds N]
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
CASES: list[tuple[str, list[str], float | None]] = [
    ("gpt", [], 1.05),
    ("gpt", ["--gradients", "off"], 1.03),
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


def measure(model: str, options: list[str], rounds: int) -> float:
    steps = STEPS_A_BLOCK[model]
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as watched_folder:
        plain = Job(Path(plain_folder), model, None)
        watched = Job(Path(watched_folder), model, options)
        for job in (plain, watched):
            job.train(WARM_UP)
        pairs = []
        for number in range(rounds):
            # Who goes first changes, so that neither always finds the machine as the other left it.
            if number % 2:
                second = watched.train(steps)
                first = plain.train(steps)
            else:
                first = plain.train(steps)
                second = watched.train(steps)
            pairs.append((first, second))
        if plain.end() or watched.end():
            sys.exit("a job failed")
    without, with_it = (statistics.median(wall for wall, _ in column) for column in zip(*pairs, strict=True))
    wall = statistics.median(second[0] / first[0] for first, second in pairs)
    work = statistics.median(second[1] / first[1] for first, second in pairs)
    what = " ".join([model, *options])
    before, after = without / steps * 1e3, with_it / steps * 1e3
    print(
        f"{what}: {before:.1f} ms a step without, {after:.1f} ms with ddpcheck: "
        f"ratio {wall:.3f} (processor time {work:.3f})"
    )
    return wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--model", choices=STEPS_A_BLOCK, action="append")
    chosen = parser.parse_args()
    missed = []
    for model, options, limit in CASES:
        if chosen.model and model not in chosen.model:
            continue
        ratio = measure(model, options, chosen.rounds)
        if limit is not None and ratio > limit:
            missed.append(f"{' '.join([model, *options])} is over {limit}")
    if missed:
        sys.exit("step time: " + ", ".join(missed))


if __name__ == "__main__":
    main()

"""Step time with and without ddpcheck, side by side: two identical jobs that train in interleaved blocks.

python benchmarks/step_time.py [--pairs N] [--rounds N] [--model gpt|mlp|many]

Two processes that do the same thing may differ by a tenth for as long as they live, mostly by how much of their memory
glibc gives back to the system, to be faulted in again at the next step. So several pairs of jobs are started, and for
comparison pairs of which neither is watched, and pairs in which glibc keeps what it has: there a step is shorter, and
what ddpcheck takes is a larger part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

JOB = Path(__file__).with_name("step_job.py")
RANKS = 2
# Buckets are rebuilt, memory is touched, and gradients have been sketched at each of the first steps.
WARM_UP = 10
STEPS_A_BLOCK = {"gpt": 2, "mlp": 10, "many": 10}
# Without these, glibc picks its thresholds in each process, depending on what is freed first.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


@dataclass(frozen=True)
class Case:
    """Options of `ddpcheck run`, None where neither job is watched; the highest ratio that is acceptable."""

    model: str
    options: list[str] | None
    limit: float | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "neither watched" if self.options is None else " ".join(self.options) or "at defaults"
        return f"{self.model}, {what}{', glibc keeps memory' if self.environment else ''}"


CASES = [
    Case("gpt", None),
    Case("gpt", [], 1.03),
    Case("gpt", ["--gradients", "off"], 1.03),
    Case("mlp", None),
    # With glibc defaults two unwatched jobs differ by up to 10 %: many pairs are needed.
    Case("mlp", [], 1.10),
    Case("mlp", ["--sketch-every", "20"]),
    Case("mlp", ["--gradients", "off"], 1.10),
    Case("mlp", None, environment=KEEP_MEMORY),
    Case("mlp", [], environment=KEEP_MEMORY),
    Case("many", []),
    Case("many", ["--gradients", "off"]),
]


class Block(NamedTuple):
    """Seconds on the slower rank; processor time and page faults of all ranks."""

    wall: float
    work: float
    faults: float


class Job:
    """One of the two jobs, trained by orders through named pipes."""

    def __init__(self, folder: Path, case: Case, watched: bool) -> None:
        self.pipes = folder / "pipe"
        for rank in range(RANKS):
            os.mkfifo(f"{self.pipes}.in.{rank}")
            os.mkfifo(f"{self.pipes}.out.{rank}")
        store = f"file://{folder / 'store'}"
        command = [
            sys.executable,
            str(JOB),
            "--model",
            case.model,
            "--store",
            store,
            "--pipes",
            str(self.pipes),
        ]
        if watched and case.options is not None:
            command = [
                sys.executable,
                "-m",
                "ddpcheck",
                "run",
                "-q",
                *case.options,
                "--out",
                str(folder / "run"),
                "--",
                *command,
            ]
        self.process = subprocess.Popen(command, env={**os.environ, **case.environment})
        self.open_pipes = contextlib.ExitStack()
        self.orders = [self._open(f"{self.pipes}.in.{rank}", "w") for rank in range(RANKS)]
        self.answers = [self._open(f"{self.pipes}.out.{rank}", "r") for rank in range(RANKS)]

    def _open(self, path: str, mode: str) -> IO[str]:
        return self.open_pipes.enter_context(open(path, mode))

    def train(self, steps: int) -> Block:
        for order in self.orders:
            print(steps, file=order, flush=True)
        told = [Block(*map(float, answer.readline().split())) for answer in self.answers]
        wall, work, faults = zip(*told, strict=True)
        return Block(max(wall), sum(work), sum(faults))

    def end(self) -> int:
        self.open_pipes.close()
        return self.process.wait()


def measure(case: Case, pairs: int, rounds: int) -> float:
    """The median over pairs of jobs of how much longer the second takes."""
    found = [ratios_of_a_pair(case, rounds, number % 2 == 1) for number in range(pairs)]
    wall, work = (statistics.median(each[of] for each in found) for of in (0, 1))
    each = ", ".join(f"{wall:.3f}" for wall, *_ in sorted(found))
    step, plain_faults, faults = (sorted(each[of] for each in found) for of in (2, 3, 4))
    print(
        f"{case}: ratio {wall:.3f} of {pairs} pairs ({each}), processor time {work:.3f}; the other one's step "
        f"{step[0] * 1000:.0f}-{step[-1] * 1000:.0f} ms; page faults a rank and step {faults[0]:.0f}-{faults[-1]:.0f}, "
        f"of the other one {plain_faults[0]:.0f}-{plain_faults[-1]:.0f}",
        flush=True,
    )
    return wall


def ratios_of_a_pair(case: Case, rounds: int, watched_first: bool) -> tuple[float, ...]:
    """Of time by the clock and of the processor; the step of the one that is not watched; page faults of both."""
    steps = STEPS_A_BLOCK[case.model]
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as watched_folder:
        folders = {False: Path(plain_folder), True: Path(watched_folder)}
        order = (watched_first, not watched_first)
        jobs = {watched: Job(folders[watched], case, watched) for watched in order}
        for job in jobs.values():
            job.train(WARM_UP)
        blocks = []
        for number in range(rounds):
            # The order alternates, so that neither job always runs in the state the other left.
            turn = order if number % 2 else order[::-1]
            blocks.append({watched: jobs[watched].train(steps) for watched in turn})
        ended = [job.end() for job in jobs.values()]
        if any(ended):
            sys.exit("a job failed")
    return (
        statistics.median(block[True].wall / block[False].wall for block in blocks),
        statistics.median(block[True].work / block[False].work for block in blocks),
        statistics.median(block[False].wall for block in blocks) / steps,
        statistics.median(block[False].faults for block in blocks) / steps / RANKS,
        statistics.median(block[True].faults for block in blocks) / steps / RANKS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=6, help="blocks of steps that each job of a pair trains"
    )
    parser.add_argument("--model", choices=STEPS_A_BLOCK, action="append")
    chosen = parser.parse_args()
    missed = []
    for case in CASES:
        if chosen.model and case.model not in chosen.model:
            continue
        ratio = measure(case, chosen.pairs, chosen.rounds)
        if case.limit is not None and ratio > case.limit:
            missed.append(f"{case} is over {case.limit}")
    if missed:
        sys.exit("step time: " + "; ".join(missed))


if __name__ == "__main__":
    main()

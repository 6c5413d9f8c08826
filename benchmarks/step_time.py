"""Step time with and without ddpcheck: pairs of identical jobs that train in interleaved blocks.

python benchmarks/step_time.py [--pairs N] [--rounds N] [--case NAME]... [--docs]

Each case prints the ratio of wall time and of processor time (all threads of all ranks), as medians over pairs, and the
limit that one of the two has to meet. Two processes that do the same work may differ by a tenth for as long as they
live, mostly by how much memory glibc returns to the system. So several pairs are started; cases in which neither job is
watched show what the measurement itself is worth.

The budget of ddpcheck decides for the first time after 64 steps. Jobs train more steps than that before they are
measured, and jobs with short steps train until the budget has settled. DDPCHECK_BENCH_WARM_UP=N sets another number.

`--docs` writes the results into the table of docs/cost.md, and into the part of it that README.md quotes. Rows of cases
that were not measured stay as they are.
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

from cost_table import DOCS, QUOTING, update

JOB = Path(__file__).with_name("step_job.py")
# Steps before the first decision of the budget, and until it has settled.
FIRST_DECISION, SETTLED = 66, 140
# Without these, glibc picks its thresholds in each process, depending on what is freed first.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
WALL, PROCESSOR = "wall", "processor"
BUDGET_OFF = ("--budget", "off")


@dataclass(frozen=True)
class Case:
    """A job, the options of `ddpcheck run` (None: neither job is watched), and the highest acceptable ratio."""

    name: str
    model: str
    options: tuple[str, ...] | None = ()
    limit: float | None = None
    # Which of the two ratios the limit is for.
    measure: str = WALL
    ranks: int = 2
    parameters: int = 2000
    steps: int = 10
    warm_up: int = SETTLED
    environment: dict[str, str] = field(default_factory=dict)
    # In the table of the docs; empty: the case shows what the measurement itself is worth.
    title: str = ""

    @property
    def warm_up_steps(self) -> int:
        return int(os.environ.get("DDPCHECK_BENCH_WARM_UP") or self.warm_up)


# In the order of the table.
CASES = [
    Case(
        "gpt", "gpt", (), 1.01, steps=2, warm_up=FIRST_DECISION,
        title="GPT, 10 million parameters in 148 tensors",
    ),
    # With glibc's defaults two unwatched MLP jobs differ by up to 10 %: many pairs are needed.
    Case("mlp", "mlp", (), 1.05, title="MLP, 10 million parameters, little arithmetic"),
    Case("tiny-2000", "tiny", (), 1.25, title="2,000 parameters of 1 KB"),
    Case(
        "tiny-1000-one-rank", "tiny", (), 1.3, PROCESSOR, ranks=1, parameters=1000, steps=20,
        title="1,000 parameters of 1 KB, one rank",
    ),
    Case(
        "tiny-10", "tiny", (), 1.15, PROCESSOR, parameters=10, steps=100, warm_up=500,
        title="10 parameters of 1 KB",
    ),
    Case(
        "resnet", "resnet", (), 1.02, steps=2, warm_up=FIRST_DECISION,
        title="ResNet-50, 161 parameters, channels_last",
    ),
    Case(
        "large-bf16", "large", (), 1.03, steps=1, warm_up=FIRST_DECISION,
        title="400 million parameters in bf16",
    ),
    Case(
        "gpt-budget-off", "gpt", BUDGET_OFF, 1.02, steps=2, warm_up=FIRST_DECISION, title="GPT, `--budget off`"
    ),
    Case("mlp-budget-off", "mlp", BUDGET_OFF, 1.08, title="MLP, `--budget off`"),
    Case("tiny-2000-budget-off", "tiny", BUDGET_OFF, 1.5, title="2,000 parameters of 1 KB, `--budget off`"),
    # One audited step in each block.
    Case("gpt-audit-10", "gpt", (*BUDGET_OFF, "--audit", "every=10"), steps=10, warm_up=FIRST_DECISION),
    Case("gpt-unwatched", "gpt", None, steps=2, warm_up=FIRST_DECISION),
    Case("mlp-unwatched", "mlp", None),
    Case("mlp-glibc-keeps-memory", "mlp", (), environment=KEEP_MEMORY),
]  # fmt: skip


class Block(NamedTuple):
    """Wall time of the slowest rank; processor time, page faults and time of the training threads of all ranks."""

    wall: float
    processor: float
    faults: float
    thread: float


class PairResult(NamedTuple):
    """Medians over the blocks of a pair: ratios, and figures per step of both jobs."""

    wall: float
    processor: float
    plain_wall: float
    plain_processor: float
    watched_processor: float
    plain_faults: float
    watched_faults: float
    plain_thread: float
    watched_thread: float


class Job:
    """A job that trains on request, through named pipes."""

    def __init__(self, folder: Path, case: Case, watched: bool) -> None:
        pipes = folder / "pipe"
        for rank in range(case.ranks):
            os.mkfifo(f"{pipes}.in.{rank}")
            os.mkfifo(f"{pipes}.out.{rank}")
        command = [sys.executable, str(JOB), "--model", case.model, "--parameters", str(case.parameters)]
        command += [
            "--ranks",
            str(case.ranks),
            "--store",
            f"file://{folder / 'store'}",
            "--pipes",
            str(pipes),
        ]
        if watched and case.options is not None:
            run = [sys.executable, "-m", "ddpcheck", "run", "-q", *case.options, "--out", str(folder / "run")]
            command = [*run, "--", *command]
        self.process = subprocess.Popen(command, env={**os.environ, **case.environment})
        self._pipes = contextlib.ExitStack()
        self._orders = [self._open(f"{pipes}.in.{rank}", "w") for rank in range(case.ranks)]
        self._answers = [self._open(f"{pipes}.out.{rank}", "r") for rank in range(case.ranks)]

    def _open(self, path: str, mode: str) -> IO[str]:
        return self._pipes.enter_context(open(path, mode))

    def train(self, steps: int) -> Block:
        for order in self._orders:
            print(steps, file=order, flush=True)
        measured = [Block(*map(float, answer.readline().split())) for answer in self._answers]
        wall, processor, faults, thread = zip(*measured, strict=True)
        return Block(max(wall), sum(processor), sum(faults), sum(thread))

    def end(self) -> int:
        self._pipes.close()
        return self.process.wait()


def measure_pair(case: Case, rounds: int, watched_first: bool) -> PairResult:
    """One plain and one watched job, whose blocks of steps alternate."""
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as watched_folder:
        folders = {False: Path(plain_folder), True: Path(watched_folder)}
        order = (watched_first, not watched_first)
        jobs = {watched: Job(folders[watched], case, watched) for watched in order}
        for job in jobs.values():
            job.train(case.warm_up_steps)
        blocks = []
        for number in range(rounds):
            # The order alternates, so that neither job always runs in the state that the other left.
            turn = order if number % 2 else order[::-1]
            blocks.append({watched: jobs[watched].train(case.steps) for watched in turn})
        statuses = [job.end() for job in jobs.values()]
        if any(statuses):
            sys.exit(f"{case.name}: a job failed")

    def per_step(watched: bool, figure: str) -> float:
        return statistics.median(getattr(block[watched], figure) for block in blocks) / case.steps

    def ratio(figure: str) -> float:
        return statistics.median(
            getattr(block[True], figure) / getattr(block[False], figure) for block in blocks
        )

    return PairResult(
        wall=ratio("wall"),
        processor=ratio("processor"),
        plain_wall=per_step(False, "wall"),
        plain_processor=per_step(False, "processor"),
        watched_processor=per_step(True, "processor"),
        plain_faults=per_step(False, "faults") / case.ranks,
        watched_faults=per_step(True, "faults") / case.ranks,
        plain_thread=per_step(False, "thread"),
        watched_thread=per_step(True, "thread"),
    )


def measure(case: Case, pairs: int, rounds: int) -> dict[str, float]:
    """Print the result of a case: the medians over its pairs."""
    results = [measure_pair(case, rounds, number % 2 == 1) for number in range(pairs)]
    medians = {
        figure: statistics.median(getattr(result, figure) for result in results)
        for figure in PairResult._fields
    }
    met = meets_limit(case, medians)
    limit = "no limit" if case.limit is None else f"limit {case.limit} for {case.measure} time"
    options = "neither job watched" if case.options is None else " ".join(case.options) or "defaults"
    each = ", ".join(f"{result.wall:.3f}/{result.processor:.3f}" for result in results)
    print(
        f"{case.name} ({options}, {case.ranks} rank{'s' * (case.ranks > 1)}): "
        f"wall {medians[WALL]:.3f}, processor {medians[PROCESSOR]:.3f} ({limit}{'' if met else ': EXCEEDED'}); "
        f"pairs {each}; a plain step takes {medians['plain_wall'] * 1000:.1f} ms and "
        f"{medians['plain_processor'] * 1000:.1f} ms of processor time; page faults per rank and step "
        f"{medians['plain_faults']:.0f} plain, {medians['watched_faults']:.0f} watched",
        flush=True,
    )
    return medians


def meets_limit(case: Case, medians: dict[str, float]) -> bool:
    return case.limit is None or medians[case.measure] <= case.limit


def table_row(case: Case, medians: dict[str, float] | None) -> list[str]:
    """The row of a case in the docs; None: it was not measured."""
    ratios = [f"{medians[figure]:.3f}" if medians else "not measured" for figure in (WALL, PROCESSOR)]
    return [case.title, f"{case.limit} {case.measure}", *ratios]


def write_docs(results: dict[str, dict[str, float]]) -> None:
    rows = [table_row(case, results.get(case.name)) for case in CASES if case.title]
    measured = {case.title for case in CASES if case.name in results}
    update(DOCS, rows, measured)
    for page in QUOTING:
        update(page, [row for row in rows if "`" not in row[0]], measured)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=6, help="blocks of steps that each job of a pair trains"
    )
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="only these")
    parser.add_argument(
        "--docs", action="store_true", help="write the results into docs/cost.md and the READMEs"
    )
    chosen = parser.parse_args()
    cases = [case for case in CASES if not chosen.case or case.name in chosen.case]
    results: dict[str, dict[str, float]] = {}
    for case in cases:
        results[case.name] = measure(case, chosen.pairs, chosen.rounds)
        if chosen.docs:
            # After each case: a run that is stopped has written what it measured.
            write_docs(results)
    exceeded = [case.name for case in cases if not meets_limit(case, results[case.name])]
    if exceeded:
        sys.exit("step time: above the limit: " + ", ".join(exceeded))


if __name__ == "__main__":
    main()

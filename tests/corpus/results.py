"""The results of the whole corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.corpus.header import Header
from tests.corpus.plain import PlainResult
from tests.corpus.verdict import Verdict

KINDS = ("nothing", "a warning", "an error", "a hang")


@dataclass(frozen=True)
class Row:
    """One script with the verdicts on all its jobs."""

    header: Header
    verdicts: tuple[Verdict, ...]
    # What PyTorch itself reports, by default and with TORCH_DISTRIBUTED_DEBUG=INFO; None: not run.
    plain: PlainResult | None = None
    detailed: PlainResult | None = None
    # Why it was not run: this version of torch lacks something.
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    @property
    def found(self) -> str:
        """Codes at warning and above, for each different result of the script's jobs."""
        if self.skipped:
            return f"not run: {self.skipped}"
        kinds = dict.fromkeys(" ".join(verdict.found) or "nothing" for verdict in self.verdicts)
        return " / ".join(kinds)

    def right(self, point: str) -> bool:
        return all(getattr(verdict, point) for verdict in self.verdicts)


@dataclass(frozen=True)
class Program:
    """A program by other authors, and how many of its parts behave as without ddpcheck."""

    name: str
    passed: int
    total: int
    note: str = ""


@dataclass(frozen=True)
class Results:
    """Rows of all parts of the corpus."""

    faults: tuple[Row, ...] = ()
    variants: tuple[Row, ...] = ()
    healthy: tuple[Row, ...] = ()
    # None: not run.
    programs: tuple[Program, ...] | None = None

    @property
    def passed(self) -> bool:
        programs = all(program.passed == program.total for program in self.programs or ())
        return programs and all(
            row.passed or row.skipped for row in [*self.faults, *self.variants, *self.healthy]
        )

    @property
    def false_alarms(self) -> int:
        return sum(len(verdict.found) for row in self.healthy for verdict in row.verdicts)

    @property
    def healthy_variants(self) -> int:
        return sum(len(row.header.cases) or 1 for row in self.healthy)

    @property
    def bugs(self) -> list[int]:
        return sorted({bug for row in self.faults for bug in row.header.bugs})

    @property
    def retried(self) -> Counter[str]:
        """Jobs that were run again, and how often."""
        counted: Counter[str] = Counter()
        for row in [*self.faults, *self.variants, *self.healthy]:
            for outcome in (verdict.outcome for verdict in row.verdicts):
                counted[outcome.job.name] += outcome.retried
            for outcomes in (row.plain, row.detailed):
                counted[f"{row.header.name} without ddpcheck"] += outcomes.retried if outcomes else 0
        return +counted

    def totals(self) -> list[str]:
        """One line for each part of the corpus."""
        parts = (("faults", self.faults), ("variants of faults", self.variants))
        lines = [_count(title, rows) for title, rows in parts if rows]
        jobs = [verdict for row in self.healthy for verdict in row.verdicts]
        if jobs:
            lines.append(
                f"healthy: {sum(v.passed for v in jobs)} of {len(jobs)} jobs as expected "
                f"({self.healthy_variants} variants), {self.false_alarms} findings at warning or above"
                + _not_run(self.healthy)
            )
        for title, kinds in (
            ("PyTorch by itself", _kinds([row.plain for row in self.faults])),
            ("with TORCH_DISTRIBUTED_DEBUG=INFO", _kinds([row.detailed for row in self.faults])),
        ):
            if kinds:
                lines.append(f"{title}: {kinds}")
        if jobs or self.faults or self.variants:
            reruns = ", ".join(f"{name} {count}" for name, count in sorted(self.retried.items()))
            lines.append(f"run again after torch failed at its own exit: {reruns or 'none'}")
        for program in self.programs or ():
            lines.append(f"{program.name}: {program.passed} of {program.total}")
        return lines


def _count(title: str, all_rows: Sequence[Row]) -> str:
    rows = [row for row in all_rows if not row.skipped]
    points = ", ".join(
        f"{name} {sum(row.right(point) for row in rows)}"
        for point, name in (("code", "code"), ("cause", "cause"), ("step", "step"), ("ranks", "rank"))
    )
    left_out = f", {len(all_rows) - len(rows)} not run" if len(rows) < len(all_rows) else ""
    return f"{title}: {sum(row.passed for row in rows)} of {len(rows)} right ({points}){left_out}"


def _not_run(rows: Sequence[Row]) -> str:
    count = sum(bool(row.skipped) for row in rows)
    return f", {count} scripts not run" if count else ""


def _kinds(outcomes: Sequence[PlainResult | None]) -> str:
    counted = Counter(one.kind for one in outcomes if one is not None)
    return ", ".join(f"{kind} for {counted[kind]}" for kind in KINDS if counted[kind])

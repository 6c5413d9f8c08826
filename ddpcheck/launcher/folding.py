"""Folds steps that all ranks have written and this launcher has compared, so that records stay bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.analysis.aggregate.agreement import Agreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.collectors.parts import PartCollector, StepRange
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.analysis.unwrapped.collector import UnwrappedCollector
from ddpcheck.records.folding import Fold, add_fold, fold_part, folded_path, join_parts, joined
from ddpcheck.rules.rule import in_report_order

# The latest parts of every rank are kept, and so many more before the next ones are folded.
PARTS_LEFT, PARTS_AT_ONCE = 3, 3
# Parts around this many findings are kept.
MOST_KEPT = 8
# What is left of a rank's parts. Above it, so many folds become one.
MOST_FOLDED_BYTES, FOLDS_AT_ONCE = 8 << 20, 8
TICK_SECONDS = 2.0
# Most of a tick. After an error, such as a full disk, nothing is folded for a while.
WORK_SECONDS, PAUSE_SECONDS = 0.1, 60.0


class Folding:
    """The launcher that reports folds: it keeps what the steps have shown. `tick` is called several times a second."""

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._due = 0.0
        self._sessions: set[str] = set()
        # By session: ranges that are kept, by their first step.
        self._kept: dict[str, set[int]] = {}
        self._work: deque[tuple[str, list[StepRange]]] = deque()
        self._parts: Iterator[tuple[Path, int]] = iter(())
        self._part: tuple[Path, int] | None = None
        # The size of what is left of a rank's parts, of the rank with most; and that at which folds are joined.
        self._largest, self._limit = 0, MOST_FOLDED_BYTES
        # The files that are to be written again, and the folds that were joined.
        self._rewrites: deque[tuple[Path, list[Fold]]] = deque()

    def follow(self, session: str) -> None:
        """Fold steps of this attempt. A second attempt with the same session has other steps of the same numbers."""
        if not session.startswith("+"):
            self._sessions.add(session)

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._due or not self._sessions:
            return
        self._due = now + TICK_SECONDS
        for session in self._sessions & self._run.attempts.keys():
            self._take(session, self._run.attempts[session])
        try:
            self._fold(now + WORK_SECONDS)
        except OSError:
            self._due = now + PAUSE_SECONDS

    def _take(self, session: str, attempt: Attempt) -> None:
        """Queue what can be folded."""
        ranks = sorted(attempt.ranks)
        if len(ranks) < attempt.world_size or any(rank.end is not None for rank in attempt.ranks.values()):
            return
        ended = attempt.collector(PartCollector)
        if any(len(ended.ranks.get(rank, ())) < PARTS_LEFT + PARTS_AT_ONCE for rank in ranks):
            return
        finding_steps = steps_of_findings(attempt)
        kept = self._kept.setdefault(session, set())
        before: list[StepRange] = []
        for each in ended.take(ranks, PARTS_LEFT):
            holds = any(0 in parts for parts in each.parts.values())
            if not holds and len(kept) < MOST_KEPT and any(_is_near(step, each) for step in finding_steps):
                kept.add(each.first)
                holds = True
            if holds:
                self._queue(session, before)
                before = []
            else:
                before.append(each)
        self._queue(session, before)

    def _queue(self, session: str, ranges: list[StepRange]) -> None:
        if ranges:
            self._work.append((session, ranges))

    def _fold(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self._part = self._part or next(self._parts, None)
            if self._part is not None:
                if fold_part(*self._part):
                    self._largest = max(self._largest, folded_path(self._part[0]).stat().st_size)
                self._part = None
            elif self._rewrites:
                path, folds = self._rewrites[0]
                join_parts(path, folds)
                self._largest = max(self._largest, folded_path(path).stat().st_size)
                # Where most of it are events, it is not much smaller now.
                self._limit = max(self._limit, 2 * self._largest)
                self._rewrites.popleft()
            elif self._largest > self._limit:
                self._join_folds()
            elif self._work:
                session, ranges = self._work[0]
                attempt = self._run.attempts.get(session)
                if attempt is not None:
                    fold = Fold(session, ranges[0].first, ranges[-1].end, all_agree(attempt))
                    add_fold(self._run.path, fold)
                    self._parts = self._parts_of(session, ranges)
                self._work.popleft()
            else:
                return

    def _join_folds(self) -> None:
        """Have fewer, longer folds, but for the latest ones."""
        self._largest, self._limit = 0, MOST_FOLDED_BYTES
        self._run.folds.refresh()
        for session in self._sessions:
            joins = joined(self._run.folds.of(session)[:-FOLDS_AT_ONCE], FOLDS_AT_ONCE)
            for fold in joins:
                add_fold(self._run.path, fold)
            if joins:
                paths = self._run.files_of(session).values()
                self._rewrites += [(path, joins) for path in paths if folded_path(path).exists()]

    def _parts_of(self, session: str, ranges: list[StepRange]) -> Iterator[tuple[Path, int]]:
        paths = self._run.files_of(session)
        for each in ranges:
            for rank, numbers in each.parts.items():
                for number in numbers:
                    yield paths[rank], number


def _is_near(step: int, steps: StepRange) -> bool:
    """Whether a step is in the range or in one that is as long beside it."""
    length = steps.end - steps.first
    return steps.first - length <= step < steps.end + length


def all_agree(attempt: Attempt) -> bool:
    """Whether no comparison of the attempt has shown a difference."""
    return not any(_differing_steps(attempt))


def _differing_steps(attempt: Attempt) -> Iterator[int]:
    agreements: tuple[Agreement, ...] = (attempt.agreement, attempt.collector(UnwrappedCollector).agreement)
    for agreement in agreements:
        firsts = [stats.first for stats in agreement.stats.values()]
        others = [agreement.hyper, agreement.forwards, agreement.rewritten, agreement.rewritten_differently]
        firsts += [each for table in others for each in table.values()]
        yield from (first.key.step for first in firsts if first is not None and first.key.step >= 0)
    for stats in attempt.gradients.stats.values():
        yield from (first.step for first in (stats.first, stats.nonfinite) if first is not None)
        if stats.diverged is not None:
            yield stats.diverged[1]


def steps_of_findings(attempt: Attempt) -> set[int]:
    """Steps of differences, and of findings that remain true however the job continues."""
    steps = set(_differing_steps(attempt))
    if not steps:
        return steps
    context = RuleContext(attempt, 0, Path(), NodeNotes(), (), None)
    for rule in in_report_order():
        if rule.live:
            try:
                steps |= {finding.step for finding in rule.find(context) if finding.step is not None}
            except Exception:
                # Records that a rule needs may be missing yet.
                continue
    return steps

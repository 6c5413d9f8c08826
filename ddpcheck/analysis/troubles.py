"""Ranks that could not write their records, and the attempt that each of them belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.analysis.report import RankStatus, RankSummary


@dataclass(frozen=True)
class Trouble:
    """What a launcher read on the board of its node; older ones did not note of which process."""

    rank: int
    text: str
    # Host and pid.
    process: tuple[str, int] | None = None

    def is_of(self, rank: int, process: tuple[str, int]) -> bool:
        return self.rank == rank and self.process in (None, process)


def place(troubles: Iterable[Trouble], ranks: Sequence[Sequence[RankSummary]]) -> list[dict[int, str]]:
    """By attempt and rank. Of a rank that wrote nothing at all no attempt knows the process: it is missing there."""
    placed: list[dict[int, str]] = [{} for _ in ranks]
    for trouble in troubles:
        told = [n for n, rows in enumerate(ranks) if any(_is_of(trouble, row) for row in rows)]
        missing = [n for n, rows in enumerate(ranks) if any(_is_missing(trouble, row) for row in rows)]
        for number in told or missing[:1] or [len(ranks) - 1]:
            placed[number].setdefault(trouble.rank, trouble.text)
    return placed


def _is_of(trouble: Trouble, row: RankSummary) -> bool:
    return row.status is not RankStatus.MISSING and trouble.is_of(row.rank, (row.host, row.pid))


def _is_missing(trouble: Trouble, row: RankSummary) -> bool:
    return row.status is RankStatus.MISSING and row.rank == trouble.rank

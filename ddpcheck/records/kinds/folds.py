"""Records about the file itself: where its parts begin and end, and what is left of steps that were folded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.registry import Record, record


@record("part")
@dataclass(frozen=True)
class PartRecord(Record):
    """First line of every part of a rank's file but the first: its number, and its first step."""

    part: int
    first: int


@record("summary")
@dataclass(frozen=True)
class SummaryRecord(Record):
    """Last line of a part, which another one follows: what to keep of its steps once ranks have been compared."""

    part: int
    # The first step, and the step after the last one. Records belong to the highest step before them.
    first: int
    end: int
    # Digest of the last steps of all tables that are compared: equal on ranks that wrote the same steps.
    position: str
    # The records of some steps, as they were.
    samples: list[dict[str, Any]] = field(default_factory=list)
    # All other records of steps: fields of `FoldedRecord`.
    folded: list[dict[str, Any]] = field(default_factory=list)
    # Offset and size of the other lines in the part: its events.
    events: list[list[int]] = field(default_factory=list)


@record("folded")
@dataclass(frozen=True)
class FoldedRecord(Record):
    """Records of one table in consecutive steps, of which only this is left. The launcher had compared them."""

    # Their kind.
    of: str
    rows: int
    # Steps of the first and the last of them.
    first: int
    last: int
    # The fields that tell tables of this kind apart.
    by: dict[str, Any] = field(default_factory=dict)
    # By field: the sum of all digests, each times an odd number that follows from its step, modulo 2^128.
    digests: dict[str, str] = field(default_factory=dict)
    # By field: how many numbers, their sum, the smallest and the largest.
    numbers: dict[str, list[float]] = field(default_factory=dict)
    # By field of sketches: the smallest and the largest code of a norm.
    norms: dict[str, list[int]] = field(default_factory=dict)
    # By field: its last value.
    latest: dict[str, Any] = field(default_factory=dict)
    # Added by readers: the first steps of the part and of the fold, and whether all ranks agreed at all of its steps.
    part: int = -1
    fold: int = -1
    agreed: bool = False

    def is_possible(self) -> bool:
        return self.rows > 0 and all(len(row) == 4 for row in self.numbers.values())

    def total(self, name: str) -> float:
        """The sum of a field; 0 where it was at its default."""
        return self.numbers.get(name, (0, 0, 0, 0))[1]

    def largest(self, name: str) -> float:
        return self.numbers.get(name, (0, 0, 0, 0))[3]

"""The trace of one rank: communication, compute and copies by step, as unions of intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from ddpcheck.traces.messages import CollectiveKind, Message

Interval = tuple[int, int]


class Cover:
    """The union of half-open intervals, given in any order."""

    __slots__ = ("_before", "ends", "starts")

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        reached: int | None = None
        for start, end in sorted(intervals):
            if end <= start:
                continue
            if reached is None or start > reached:
                self.starts.append(start)
                self.ends.append(end)
                reached = end
            elif end > reached:
                self.ends[-1] = reached = end
        # Length before each piece, for lookups by binary search.
        self._before: list[int] = list(accumulate(map(sub, self.ends, self.starts), initial=0))

    def __iter__(self) -> Iterator[Interval]:
        return zip(self.starts, self.ends, strict=True)

    @property
    def length(self) -> int:
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """The covered length between `start` and `end`."""
        return max(0, self._up_to(end) - self._up_to(start))

    def shared(self, other: Cover) -> int:
        """The length that both cover."""
        few, many = sorted((self, other), key=lambda cover: len(cover.starts))
        return sum(many.within(start, end) for start, end in few)

    def without(self, other: Cover) -> Cover:
        """The part that `other` does not cover."""
        left: list[Interval] = []
        for start, end in self:
            at = start
            for hole_start, hole_end in other._touching(start, end):
                left.append((at, hole_start))
                at = hole_end
            left.append((at, end))
        return Cover(left)

    def _touching(self, start: int, end: int) -> Iterator[Interval]:
        for index in range(bisect_right(self.ends, start), len(self.starts)):
            if self.starts[index] >= end:
                return
            yield self.starts[index], self.ends[index]

    def _up_to(self, time: int) -> int:
        index = bisect_right(self.starts, time)
        if not index:
            return 0
        return self._before[index] - max(0, self.ends[index - 1] - time)


# A piece of compute or a copy: start and end in nanoseconds since 1970, and the step that launched it.
Work = tuple[int, int, int | None]


@dataclass(frozen=True)
class Collective:
    """One collective on this rank."""

    start: int
    end: int
    kind: CollectiveKind
    name: str
    # The stream or thread it ran on.
    lane: str
    message: Message
    # When the CPU launched it; None if unknown.
    ready: int | None
    step: int | None
    # Index of the DDP bucket within its step; None for other collectives.
    bucket: int | None

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class StepWindow:
    """A step as the profiler marked it on the CPU."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank."""

    rank: int
    file: str
    # Source of the times: "GPU kernels" or "spans of gloo".
    source: str
    world_size: int | None
    collectives: tuple[Collective, ...]
    compute: tuple[Work, ...]
    copies: tuple[Work, ...]
    steps: tuple[StepWindow, ...]
    # Intervals of ddpcheck's own work.
    own: tuple[Interval, ...] = ()

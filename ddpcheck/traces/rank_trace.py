"""The trace of one rank: communication, compute and copies by step."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.traces.intervals import Interval
from ddpcheck.traces.messages import CollectiveKind, Message

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

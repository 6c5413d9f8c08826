"""One rank's trace, ready for analysis: what communicated, what computed, and in which step."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.traces.intervals import Interval
from ddpcheck.traces.kernels import CollectiveKind
from ddpcheck.traces.messages import Message

# A piece of compute or a copy: start and end in nanoseconds since 1970, and the step that launched it.
Work = tuple[int, int, int | None]


@dataclass(frozen=True)
class Collective:
    """One operation between ranks, as this rank saw it."""

    start: int
    end: int
    kind: CollectiveKind
    name: str
    # The stream or thread it ran on.
    lane: str
    message: Message
    # When the processor handed it over; None where the trace does not show it.
    ready: int | None
    step: int | None
    # Which bucket of DDP's this is, counted within its step; None for a collective of another origin.
    bucket: int | None

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class StepWindow:
    """A step as the profiler marked it on the processor."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class RankTrace:
    """All that is known of one rank."""

    rank: int
    file: str
    # Where the figures come from, in words: "GPU kernels" or "spans of gloo".
    source: str
    world_size: int | None
    collectives: tuple[Collective, ...]
    compute: tuple[Work, ...]
    copies: tuple[Work, ...]
    steps: tuple[StepWindow, ...]
    # What ddpcheck itself did meanwhile, which is no compute of the job's.
    own: tuple[Interval, ...] = ()

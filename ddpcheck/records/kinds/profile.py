"""Records about profiled steps: the trace files, and when gradients became ready."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import Record, record


@record("trace")
@dataclass(frozen=True)
class TraceRecord(Record):
    """A profile was written to `file`. Without a file, the user's own profiler was active."""

    # Relative to the run folder; an absolute path where the user's program wrote it.
    file: str
    own: bool = True
    # The first step in it and the step after the last, for a profile of ddpcheck.
    first: int = 0
    end: int = 0
    # Time that threads of this rank were runnable without a processor.
    held_up_ns: int = 0


@record("ready")
@dataclass(frozen=True)
class ReadyRecord(Record):
    """When each gradient of one reduced backward became ready, in a profiled step."""

    module: int
    number: int
    step: int
    # Time of the first gradient in nanoseconds since 1970, and the delay of each gradient after it.
    begin_ns: int
    order: list[int]
    after_us: list[int]
    # When DDP finished the backward.
    done_us: int
    # Sizes in bytes at which DDP closes its buckets; the last applies to all further buckets.
    limits: list[int] = field(default_factory=list)

"""Records of step times, profiler traces, when gradients were ready, and what ddpcheck itself costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import BlockTable, Record, record


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


@record("clocks", BlockTable(of_one_rank=True))
@dataclass(frozen=True)
class ClockRecord(Record):
    """Durations of the phases of several consecutive steps, in microseconds, one number per step."""

    # The first step.
    step: int
    # From the end of one step to the end of the next, without the time that ddpcheck took.
    total: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    # Communication that did not overlap with the backward.
    wait: list[int] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)
    # Time that ddpcheck took.
    watching: list[int] = field(default_factory=list)
    # Time that the training thread was runnable without a processor, in any phase; -1: not known.
    queued: list[int] = field(default_factory=list)
    # Page faults of the training thread, and its time in the kernel for any reason; -1: not known.
    faults: list[int] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)
    # The same phases by the clock of the GPU; -1: its events were not complete in time.
    device: dict[str, list[int]] = field(default_factory=dict)
    # DDP's own averages, once at the end.
    ddp: dict[str, int] = field(default_factory=dict)


@record("cost", BlockTable(of_one_rank=True))
@dataclass(frozen=True)
class CostRecord(Record):
    """The time that ddpcheck took during some steps, and how often the budget let it check."""

    # The first step, and the number of steps.
    step: int
    steps: int
    # Time from the end of the step before to the end of the last one, in microseconds, including ddpcheck's own.
    wall: int
    # Time in the training thread by probe, in microseconds.
    spent: dict[str, int] = field(default_factory=dict)
    # Time of ddpcheck's kernels on the device, in microseconds; -1: not known.
    device: int = 0
    # In these steps: verified the AllReduce, compared applied gradients and parameters at every N-th step.
    sketch_every: int = 1
    applied_every: int = 1
    params_every: int = 1

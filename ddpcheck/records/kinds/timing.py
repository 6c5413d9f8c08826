"""Step times of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import Record, record


@record("clocks")
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

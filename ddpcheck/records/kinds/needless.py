"""Records of synchronisation that a job may not need: unused parameters, buffers, barriers, device waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.records.registry import Record, record


class HostWait(str, Enum):
    """Why the host waits."""

    # For all other ranks.
    BARRIER = "barrier"
    # For work that it has submitted to the device.
    DEVICE = "device"


@record("module_syncs")
@dataclass(frozen=True)
class ModuleSyncsRecord(Record):
    """Totals of a DDP module since it was wrapped. A later record replaces an earlier one."""

    module: int
    # Steps of its optimizer so far.
    step: int
    # Reduced backwards before which DDP searched for unused parameters, those in which this rank used all of them,
    # and the time that the search took on the host, in microseconds.
    searches: int = 0
    all_used: int = 0
    search_us: int = 0
    # Forwards in evaluation mode with gradients and without a backward, in which DDP broadcast the buffers; its time.
    evaluations: int = 0
    broadcast_us: int = 0
    # Call site of one of these forwards.
    where: str = ""


@record("host_waits")
@dataclass(frozen=True)
class HostWaitsRecord(Record):
    """Where the program waited between the steps `step` and `step + steps`: written once."""

    step: int
    steps: int
    # [value of HostWait, function, call site, steps with a call, calls, microseconds]
    sites: list[list[str | int]] = field(default_factory=list)

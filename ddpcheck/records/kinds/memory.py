"""Memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import BlockTable, Record, record


@record("memory", BlockTable(of_one_rank=True))
@dataclass(frozen=True)
class MemoryRecord(Record):
    """Memory of this rank after a step, in bytes; written when it changed, otherwise at intervals."""

    step: int
    # Anonymous memory of the process after the step, and at the first gradient of its last backward.
    host: int = 0
    high: int = 0
    # torch's statistics of its device: allocated and reserved after the step, peak allocated so far.
    allocated: int = 0
    reserved: int = 0
    peak: int = 0


@record("memory_parts")
@dataclass(frozen=True)
class MemoryPartsRecord(Record):
    """Memory of a module and its optimizer, in bytes; written when it changed."""

    module: int
    optimizer: int
    step: int
    # The device of the parameters: "cpu", "cuda:0", ...
    device: str = "cpu"
    parameters: int = 0
    buffers: int = 0
    # Where gradients are views of DDP's buckets, `gradients` counts those outside the buckets.
    gradients: int = 0
    buckets: int = 0
    views: bool = False
    state: int = 0
    # Gradients of earlier steps that still existed when the backward began.
    kept: int = 0
    # Memory of the process, or of torch on its device, without parameters and buffers, before the module was wrapped.
    base: int = 0
    # Memory that this rank holds on other devices than its own, by device.
    elsewhere: dict[str, int] = field(default_factory=dict)

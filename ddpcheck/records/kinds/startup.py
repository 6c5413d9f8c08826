"""Start-up of a rank, from the start of its process to its first step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddpcheck.records.registry import Record, record


class StartupStage(str, Enum):
    """The stages from the start of the process to the end of the first step."""

    INTERPRETER = "interpreter"
    TORCH = "torch"
    GROUP = "group"
    LOAD = "load"
    COPY = "copy"
    WRAP = "wrap"
    # Part of `wrap`: DDP compares the shapes of all ranks, which waits for the last rank.
    MEET = "meet"
    # Part of `wrap`: the broadcast of parameters, after all ranks have arrived.
    BROADCAST = "broadcast"
    BATCH = "batch"
    STEP = "step"


@record("startup")
@dataclass(frozen=True)
class StartupRecord(Record):
    """One stage of the start-up of a rank."""

    stage: str
    # Its begin, and its duration.
    time: float
    seconds: float = 0.0
    # The function that was called: torch.load, from_pretrained, Module.to, ...
    via: str = ""
    # Bytes of the files, copied to a device or broadcast.
    bytes: int = 0
    # [path, bytes, "read", "mapped" or "cufile"]
    files: list[list[Any]] = field(default_factory=list)
    # Bytes that the process read by system calls during the stage, and bytes that came from storage.
    read: int = 0
    storage: int = 0
    # Memory of the process afterwards, and an upper bound of its peak during the stage above the level before.
    host: int = 0
    staged: int = 0
    # torch's memory on the device afterwards, and its growth.
    device: int = 0
    moved: int = 0

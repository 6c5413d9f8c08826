"""Stacks of ranks in a job that makes no progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.registry import Record, record


@record("standing")
@dataclass(frozen=True)
class StackRecord(Record):
    """The stack of the training thread, on request of the launcher."""

    # Number of the request.
    look: int
    time: float
    # The innermost call first: [file, line, function]. No local variables.
    frames: list[list[Any]]
    # The optimizer step in progress, and the last hook event that a probe received.
    step: int = 0
    moment: str = ""
    # The training thread's id in the operating system.
    thread: int = 0
    # Collectives issued so far, by process group, where the backend counts them.
    collectives: dict[str, int] = field(default_factory=dict)
    # The rank has destroyed its process group.
    left: bool = False

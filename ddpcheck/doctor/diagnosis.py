"""What a check says: how bad it is, what is the matter, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Level(str, Enum):
    """From what stops a job to what is as it should be."""

    # The job would fail or hang, or ddpcheck could not watch it.
    PROBLEM = "problem"
    # It costs speed or changes results, or fails under circumstances that are common.
    WARNING = "warning"
    # Worth knowing before one wonders.
    NOTE = "note"
    OK = "ok"

    @property
    def place(self) -> int:
        """The worst first."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Diagnosis:
    """One sentence each; `hosts` and `ranks` are those it is about, none where there is only this machine."""

    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

"""A finding: one thing that is wrong with a job, with where, who, why and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad a finding is; `error` fails a run by default."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def weight(self) -> int:
        return {"error": 2, "warning": 1, "note": 0}[self.value]


@dataclass(frozen=True)
class Finding:
    """One finding, as it stands in report.json."""

    code: str
    severity: Severity
    title: str
    message: str
    module: str | None = None
    step: int | None = None
    stage: str | None = None
    parameter: str | None = None
    ranks: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    fix: str = ""
    attempt: int = 0

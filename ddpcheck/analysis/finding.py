"""A finding: one problem of a job, with its location, ranks, cause and fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """Severity of a finding. By default `error` fails a run."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def weight(self) -> int:
        return {"error": 2, "warning": 1, "note": 0}[self.value]


@dataclass(frozen=True)
class Finding:
    """One finding, as in report.json."""

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

"""A diagnosis: one finding of the doctor, or the statement that a check passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity

# Names of the severities in `--json`, where a check that passed is "ok".
LEVELS = {Severity.ERROR: "problem", Severity.WARNING: "warning", Severity.NOTE: "note"}
_OK = "ok"
_SEVERITIES = {level: severity for severity, level in LEVELS.items()} | {_OK: Severity.NOTE}


@dataclass(frozen=True)
class Diagnosis(Finding):
    """A finding whose `code` is the name of its check.

    `hosts` and `ranks` are those that it is about; both are empty if only this machine was checked.
    """

    hosts: tuple[str, ...] = ()
    passed: bool = False

    @property
    def level(self) -> str:
        return _OK if self.passed else LEVELS[self.severity]

    def as_json(self) -> dict[str, Any]:
        return {
            "check": self.code,
            "level": self.level,
            "what": self.message,
            "why": self.cause,
            "fix": self.fix,
            "hosts": list(self.hosts),
            "ranks": list(self.ranks),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Diagnosis:
        return cls(
            code=raw["check"],
            severity=_SEVERITIES[raw["level"]],
            title=raw["check"],
            message=raw["what"],
            cause=raw["why"],
            fix=raw["fix"],
            hosts=tuple(raw["hosts"]),
            ranks=tuple(raw["ranks"]),
            evidence=raw["evidence"],
            passed=raw["level"] == _OK,
        )


def diagnosis(
    severity: Severity,
    message: str,
    cause: str = "",
    fix: str = "",
    *,
    hosts: Sequence[str] = (),
    ranks: Sequence[int] = (),
    evidence: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """A diagnosis without a code: the registry adds the name of the check."""
    return Diagnosis(
        "",
        severity,
        "",
        message,
        ranks=tuple(ranks),
        evidence=evidence or {},
        cause=cause,
        fix=fix,
        hosts=tuple(hosts),
    )


def problem(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """The job would fail or hang, or ddpcheck could not record it."""
    return diagnosis(Severity.ERROR, message, cause, fix, **about)


def warning(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """It costs speed, changes results, or fails under common circumstances."""
    return diagnosis(Severity.WARNING, message, cause, fix, **about)


def note(message: str, cause: str, fix: str, **about: Any) -> Diagnosis:
    """Worth knowing, and usually harmless."""
    return diagnosis(Severity.NOTE, message, cause, fix, **about)


def ok(message: str, **about: Any) -> Diagnosis:
    """The check passed."""
    return replace(diagnosis(Severity.NOTE, message, **about), passed=True)

"""Decides whether a report fails a run: by the severity of its findings, and by what was compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report import Verdict

NEVER = "never"
# The finding that trained parameters were not compared.
_NOT_COMPARED = "DDP606"


@dataclass(frozen=True)
class ExitPolicy:
    """The options --fail-on and --allow-incomplete."""

    fail_on: str = "error"
    allow_incomplete: bool = False

    @property
    def fails_if_incomplete(self) -> bool:
        return self.fail_on != NEVER and not self.allow_incomplete

    def fails_on(self, code: str, severity: Severity) -> bool:
        """Whether one finding fails the run."""
        if self.fail_on == NEVER or (self.allow_incomplete and code == _NOT_COMPARED):
            return False
        return severity.weight >= Severity(self.fail_on).weight

    def fails(self, findings: Iterable[tuple[str, Severity]], incomplete: bool) -> bool:
        """Whether the report fails the run, given the codes and severities of its findings."""
        if incomplete and self.fails_if_incomplete:
            return True
        return any(self.fails_on(code, severity) for code, severity in findings)


def is_incomplete(verdict: Verdict | str, complete: bool | None) -> bool:
    """Whether a report is no proof that replicas agree. `complete`: of its coverage; None if it has none.

    A report with warnings and with parameters that were not compared has the verdict `findings`.
    """
    return verdict == Verdict.INCOMPLETE or complete is False

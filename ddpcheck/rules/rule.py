"""A rule's metadata, and the registry: every module `ddpNNN` in a package below `ddpcheck.rules`."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from ddpcheck import rules as package
from ddpcheck.analysis.divergence.explain import Cause, Explain
from ddpcheck.analysis.finding import Finding, Severity

if TYPE_CHECKING:
    from ddpcheck.analysis.context import RuleContext


class Need(str, Enum):
    """What a run must contain for a rule to be able to report. The value is the name that the report uses."""

    RECORDS = "records"
    # Comparisons, as `Report.checks` names them.
    PARAMETERS_AFTER_WRAPPING = "parameters after wrapping"
    BUFFERS_AFTER_WRAPPING = "buffers after wrapping"
    SYNCHRONISED_BUFFERS = "buffers after each synchronisation"
    PARAMETERS = "parameters after each step"
    APPLIED_GRADIENTS = "gradients as applied"
    REDUCED_GRADIENTS = "reduced gradients against the mean"
    HYPERPARAMETERS = "optimizer hyperparameters, scale and step counts"
    # Sections: fields of `Report`.
    DATA = "data"
    TIME = "time"
    OVERLAP = "overlap"
    LINKS = "links"
    TRAFFIC = "traffic"
    MEMORY = "memory"

    @property
    def is_section(self) -> bool:
        return self in (Need.DATA, Need.TIME, Need.OVERLAP, Need.LINKS, Need.TRAFFIC, Need.MEMORY)


class Location(Enum):
    """The line of the user's script to which a report attaches findings without a stack."""

    SCRIPT = "script"
    # Where the module is wrapped; where the optimizer steps, if the finding has a step.
    WRAPPING = "wrapping"
    STEP = "step"


def first_sentence(finding: Finding) -> str:
    """The first sentence of the message, without its full stop."""
    return re.split(r"\.(?:\s+(?=[A-Z])|$)", finding.message, maxsplit=1)[0]


def _no_findings(context: RuleContext) -> list[Finding]:
    return []


def _judged(context: RuleContext) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """The metadata of one rule. Its file also defines `find(context)`, which the registry adds as `find`."""

    code: str
    # The severity of its findings unless a finding says otherwise; the documentation shows it.
    severity: Severity
    # Title of findings and of the explanation page.
    title: str
    # One line for the table in docs/findings.md.
    summary: str
    # The rule can report if the run contains one of these. Empty: it can always report.
    needs: tuple[Need, ...] = (Need.RECORDS,)
    # Its findings remain true however the job continues, so the live view shows them.
    live: bool = False
    # An error means that replicas no longer hold the same model.
    replicas_diverge: bool = False
    # A finding means that too little was recorded for a verdict.
    incomplete: bool = False
    location: Location = Location.SCRIPT
    # The sentence of the verdict when the finding leads it; None: the title.
    headline: Callable[[Finding], str] | None = None
    # Position among findings of equal severity, causes before their effects; None: the number of the code.
    order: float | None = None
    find: Callable[[RuleContext], list[Finding]] = _no_findings
    # Why this run cannot be judged although what the rule needs was measured; empty: it was judged. A module that
    # defines `withheld(context)` sets it.
    withheld: Callable[[RuleContext], str] = _judged
    parameter_causes: list[Cause] = field(default_factory=list, repr=False, compare=False)
    gradient_causes: list[Cause] = field(default_factory=list, repr=False, compare=False)

    @property
    def can_be_ignored(self) -> bool:
        """False where a report would otherwise call replicas equal that are not, or a job watched that was not."""
        return not self.replicas_diverge and not self.incomplete

    @property
    def position(self) -> float:
        return float(self.code.removeprefix("DDP")) if self.order is None else self.order

    def explains_parameters(self, precedence: int) -> Callable[[Explain], Explain]:
        """Register a function as a cause of diverging parameters."""
        return self._register(self.parameter_causes, precedence)

    def explains_gradients(self, precedence: int) -> Callable[[Explain], Explain]:
        """Register a function as a cause of diverging gradients."""
        return self._register(self.gradient_causes, precedence)

    def _register(self, causes: list[Cause], precedence: int) -> Callable[[Explain], Explain]:
        def register(explain: Explain) -> Explain:
            causes.append(Cause(self.code, precedence, explain))
            return explain

        return register


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, sorted by code."""
    return tuple(sorted(_discovered(), key=lambda rule: rule.code))


def in_report_order() -> tuple[Rule, ...]:
    """All rules, causes before their effects."""
    return tuple(sorted(rules(), key=lambda rule: rule.position))


def rule_of(code: str) -> Rule | None:
    """None for a code of another version of ddpcheck."""
    return next((rule for rule in rules() if rule.code == code), None)


def is_about(code: str, need: Need) -> bool:
    """Whether the findings of `code` are based on `need`, for example on the memory section of a report."""
    rule = rule_of(code)
    return rule is not None and need in rule.needs


def _discovered() -> Iterator[Rule]:
    for group in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not group.ispkg:
            continue
        folder = importlib.import_module(group.name)
        for file in pkgutil.iter_modules(folder.__path__, f"{group.name}."):
            if file.name.rpartition(".")[2].startswith("ddp"):
                module = importlib.import_module(file.name)
                yield replace(module.RULE, find=module.find, withheld=getattr(module, "withheld", _judged))

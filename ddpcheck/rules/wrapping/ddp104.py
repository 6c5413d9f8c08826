"""DDP104: a parameter was added, replaced or unfrozen after wrapping."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.parameters import divergence
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks

FIX = (
    "Wrap the model in DDP again after the change, or make all parameters and set requires_grad before "
    "wrapping."
)


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    parted = divergence(case.attempt, module)
    if parted is not None and parted.code == "DDP104":
        evidence = {**of_disagreement(case.attempt, parted.found, case.folder), **parted.evidence}
        return [
            case.finding(
                "DDP104",
                f"{parted.parameter} was {parted.cause} after wrapping, so DDP does not reduce its "
                f"gradients; from step {parted.found.moment.step} on ranks hold different values.",
                found=parted.found,
                parameter=parted.parameter,
                evidence=evidence,
                cause=f"{parted.cause} after wrapping",
                fix=FIX,
            )
        ]
    return _harmless_so_far(case, module)


def _harmless_so_far(case: RuleContext, module: ModuleKey) -> list[Finding]:
    """The ranks still agree: perhaps the user reduces that gradient by hand. Worth a word, no alarm."""
    seen = {
        (record.parameter, record.change): (rank, record)
        for rank, data in case.attempt.of_module(module).items()
        for key, record in data.structure
        if key == module
    }
    if not seen:
        return []
    (parameter, change), (_, record) = next(iter(seen.items()))
    ranks = tuple(
        rank
        for rank, data in case.attempt.of_module(module).items()
        if any(key == module for key, _ in data.structure)
    )
    return [
        case.finding(
            "DDP104",
            f"{parameter} was {change} after wrapping on {name_ranks(ranks)}: DDP does not reduce its "
            "gradients. The ranks still agreed where they were compared.",
            severity=Severity.NOTE,
            module=module,
            step=record.step,
            parameter=parameter,
            ranks=ranks,
            evidence={"changes": [{"parameter": name, "change": how} for name, how in list(seen)[:10]]},
            cause=f"{change} after wrapping",
            fix=FIX,
        )
    ]

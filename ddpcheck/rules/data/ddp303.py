"""DDP303: every epoch came in the same order."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.collector import RepeatedOrder
from ddpcheck.analysis.finding import Finding, Severity


def find(case: RuleContext) -> list[Finding]:
    findings = []
    modules = set(case.attempt.modules())
    for (module, loader), repeats in sorted(case.attempt.data.repeats.items()):
        example = repeats.example
        repeated = repeated_epochs(repeats)
        # In a sequential order nothing was meant to change.
        if module not in modules or example is None or not repeated or not example.loader.shuffle:
            continue
        at = example.epoch.at
        stayed = f"the sampler's epoch stayed at {at}: set_epoch was not called"
        cause = stayed if at is not None else "the order was drawn from the same seed again"
        findings.append(
            case.finding(
                "DDP303",
                f"{len(repeated)} of {len(repeats.compared)} epochs came in the same order as the one before "
                f"them, though {example.loader.sampler} shuffles; first in epoch {repeated[0]}.",
                severity=Severity.WARNING,
                module=module,
                step=example.epoch.step,
                stage="forward",
                ranks=tuple(sorted(repeats.same[repeated[0]])),
                evidence={
                    "sampler": example.loader.sampler,
                    "loader": loader,
                    "epochs_repeated": repeated[:20],
                },
                cause=cause,
                fix="Call sampler.set_epoch(epoch) on every rank at the start of each epoch.",
            )
        )
    return findings


def repeated_epochs(repeats: RepeatedOrder) -> list[int]:
    """Epochs that no rank drew in another order than the epoch before."""
    return sorted(epoch for epoch, ranks in repeats.same.items() if ranks == repeats.compared[epoch])

"""DDP303: every epoch used the same sample order."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.collector import RepeatedOrder
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP303",
    severity=Severity.WARNING,
    title="Every epoch used the same sample order",
    summary="every epoch has the same order",
    needs=(Need.DATA,),
    headline=first_sentence,
)


def find(context: RuleContext) -> list[Finding]:
    findings = []
    modules = {*context.attempt.modules(), *context.attempt.sharded_roots()}
    for (module, loader), repeats in sorted(context.attempt.data.repeats.items()):
        example = repeats.example
        repeated = _repeated_epochs(repeats)
        # A sequential order is the same in every epoch on purpose.
        if module not in modules or example is None or not repeated or not example.loader.shuffle:
            continue
        epoch = example.epoch.at
        cause = (
            "the order was drawn from the same seed again"
            if epoch is None
            else f"the sampler's epoch stayed at {epoch}: set_epoch was not called"
        )
        findings.append(
            context.finding(
                RULE,
                f"{len(repeated)} of {len(repeats.compared)} epochs used the same order as the epoch before, "
                f"although {example.loader.sampler} shuffles. The first is epoch {repeated[0]}.",
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


def _repeated_epochs(repeats: RepeatedOrder) -> list[int]:
    """Epochs that every rank drew in the same order as the epoch before."""
    return sorted(epoch for epoch, ranks in repeats.same.items() if ranks == repeats.compared[epoch])

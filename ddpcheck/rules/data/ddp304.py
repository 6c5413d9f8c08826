"""DDP304: local gradients are identical on several ranks."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.data import ddp301

# One pair of equal gradients may be chance (a batch of one kind, a dead network); this many are not.
_FEWEST = 2


def find(case: RuleContext) -> list[Finding]:
    # Where the batches themselves are known to be the same, that is the thing to say.
    same_batches = {finding.module for finding in ddp301.find(case)}
    findings = []
    for module in case.modules():
        tally = case.attempt.gradients.tallies.get(module)
        if tally is None or case.attempt.number(module) in same_batches:
            continue
        for ranks, count in sorted(tally.twins.items(), key=lambda item: -item[1])[:1]:
            if count >= _FEWEST and 2 * count >= tally.checked:
                findings.append(_finding(case, module, ranks, count, tally.checked))
    return findings


def _finding(
    case: RuleContext, module: ModuleKey, ranks: tuple[int, ...], count: int, checked: int
) -> Finding:
    who = name_ranks(ranks)
    return case.finding(
        "DDP304",
        f"{who[0].upper()}{who[1:]} computed the same gradients to the bit in {count} of {checked} backwards: the "
        "work of all but one of them is lost.",
        severity=Severity.WARNING,
        module=module,
        stage=Stage.LOCAL.value,
        ranks=ranks,
        evidence={"identical_backwards": count, "checked": checked},
        cause="these ranks train on the same data with the same random numbers",
        fix="Give every rank its own share of the data (DistributedSampler, or a split by rank).",
    )

"""DDP304: local gradients are identical on several ranks."""

from __future__ import annotations

from ddpcheck.analysis.case import Case, name_ranks
from ddpcheck.analysis.findings import Finding, Severity
from ddpcheck.records.schema import Stage

# One pair of equal gradients may be chance (a batch of one kind, a dead network); this many are not.
_FEWEST = 2


def find(case: Case) -> list[Finding]:
    findings = []
    for module in case.modules():
        tally = case.attempt.gradients.tallies.get(module)
        if tally is None:
            continue
        for ranks, count in sorted(tally.twins.items(), key=lambda item: -item[1])[:1]:
            if count < _FEWEST or 2 * count < tally.checked:
                continue
            findings.append(
                case.finding(
                    "DDP304",
                    f"{name_ranks(ranks)[0].upper()}{name_ranks(ranks)[1:]} computed the same gradients to the bit in "
                    f"{count} of {tally.checked} backwards: the work of all but one of them is lost.",
                    severity=Severity.WARNING,
                    module=module,
                    stage=Stage.LOCAL.value,
                    ranks=ranks,
                    evidence={"identical_backwards": count, "checked": tally.checked},
                    cause="these ranks train on the same data with the same random numbers",
                    fix="Give every rank its own share of the data (DistributedSampler, or a split by rank).",
                )
            )
    return findings

"""DDP102: parameters differed before the broadcast, which overwrote them."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind


def find(case: RuleContext) -> list[Finding]:
    findings = []
    for module in case.modules():
        before = case.attempt.agreement.stats_of(module, Stage.INIT_BEFORE, TensorKind.PARAMETERS).first
        after = case.attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.PARAMETERS)
        if before is None or after.first is not None or not after.compared:
            continue
        evidence = of_disagreement(case.attempt, before, case.folder)
        differing = evidence["parameters"]
        source = module[0][0]
        findings.append(
            case.finding(
                "DDP102",
                f"{differing['count']} of {differing['of']} parameters differed before wrapping "
                f"({name_ranks(tuple(before.digests))}); DDP overwrote them all with rank {source}'s.",
                severity=Severity.NOTE,
                found=before,
                evidence=evidence,
                cause="every rank started from its own random numbers or its own file",
                fix=f"Nothing, if rank {source}'s weights are the ones you mean to train.",
            )
        )
    return findings

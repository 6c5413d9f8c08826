"""DDP102: parameters differed before the broadcast, which overwrote them."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.rule import Location, Rule

RULE = Rule(
    code="DDP102",
    severity=Severity.NOTE,
    title="Parameters differed before the broadcast, which overwrote them",
    summary="parameters differed before the broadcast, which overwrote them",
    location=Location.WRAPPING,
    # Usually intended: after the other notes about the job.
    order=604.6,
)


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for module in context.modules():
        before = context.attempt.agreement.stats_of(module, Stage.INIT_BEFORE, TensorKind.PARAMETERS).first
        after = context.attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.PARAMETERS)
        if before is None or after.first is not None or not after.compared:
            continue
        evidence = of_disagreement(context.attempt, before, context.folder)
        differing = evidence["parameters"]
        source = module[0][0]
        findings.append(
            context.finding(
                RULE,
                f"{differing['count']} of {differing['of']} parameters differed before wrapping "
                f"({name_ranks(tuple(before.digests))}). DDP overwrote them all with rank {source}'s.",
                disagreement=before,
                evidence=evidence,
                cause="every rank initialised its parameters from its own random numbers or its own file",
                fix=f"Nothing, if you want to train rank {source}'s weights.",
            )
        )
    return findings

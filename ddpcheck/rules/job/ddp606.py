"""DDP606: trained parameters were not compared."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus
from ddpcheck.analysis.step_coverage.build import EXPECTED
from ddpcheck.analysis.step_coverage.model import Gap
from ddpcheck.analysis.step_coverage.text import gap_text, reason_text
from ddpcheck.rules.rule import Location, Rule, first_sentence

RULE = Rule(
    code="DDP606",
    severity=Severity.ERROR,
    title="Trained parameters were not compared",
    summary="trained parameters were not compared, and why: the report is no proof that replicas agree",
    needs=(),
    incomplete=True,
    # After ranks that are missing, before ddpcheck's own errors.
    order=603.7,
    location=Location.STEP,
    headline=first_sentence,
)

# DDP605 reports the other gaps, and their causes.
_OWN = (
    Gap.NOT_COMPARED,
    Gap.NO_STEP_COMPARED,
    Gap.NO_STEP_SEEN,
    Gap.NO_REPLICA,
    Gap.NOT_STEPPED,
    Gap.CAPTURED,
)
# These jobs ended before there was anything to compare, which is reported as such.
_CUT_SHORT = (RankStatus.DIED, RankStatus.RAISED, RankStatus.STOPPED, RankStatus.MISSING)


def find(context: RuleContext) -> list[Finding]:
    coverage = context.coverage()
    if coverage.gap not in _OWN:
        return []
    if coverage.gap in (Gap.NO_STEP_COMPARED, Gap.NO_STEP_SEEN, Gap.NO_REPLICA):
        # With different hash algorithms, DDP604 says that digests cannot be compared.
        algorithms = {rank.header.algorithm for rank in context.attempt.ranks.values()}
        if context.with_status(*_CUT_SHORT) or len(algorithms) > 1:
            return []
    what, why, fix = gap_text(coverage, bool(context.attempt.modules()))
    rows = [
        {
            "optimizer": optimizer.name,
            "where": optimizer.where,
            "steps": optimizer.steps,
            "not_compared": sum(optimizer.not_compared.values()),
            "reason": ", ".join(map(reason_text, optimizer.not_compared)),
        }
        for optimizer in coverage.optimizers
        if optimizer.not_compared.keys() - EXPECTED
    ]
    return [
        context.finding(
            RULE,
            f"{what}: {why}. A report without findings about them is no proof that replicas agree.",
            ranks=coverage.ranks,
            evidence={"trained": coverage.trained, "compared": coverage.compared, "optimizers": rows},
            cause=why,
            fix=fix,
        )
    ]

"""DDP203: reduced gradients differ across ranks."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import Divergence, Explanation, Precedence, gradient_evidence
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP203",
    severity=Severity.ERROR,
    title="Reduced gradients differ across ranks",
    summary="reduced gradients differ across ranks",
    needs=(Need.REDUCED_GRADIENTS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)


@RULE.explains_gradients(Precedence.UNEXPLAINED)
def _reduction(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation:
    checks = attempt.gradients.stats.get(module)
    if checks is not None and checks.checked and not checks.results_compared(first.key.step):
        cause = "the reduction did not give all ranks the same result, or code wrote to the gradients through .data"
        return Explanation(
            cause=f"{cause}: the AllReduce was not verified at this step",
            evidence={"allreduce_verified": False},
        )
    return Explanation(cause="the reduction did not give all ranks the same result")


def find(context: RuleContext) -> list[Finding]:
    return [_finding(context, divergence) for divergence in context.diverged_gradients(RULE)]


def _finding(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = gradient_evidence(context.attempt, divergence, context.folder)
    names = evidence["parameters"]["names"]
    hooks = sorted({hook for rank in context.attempt.ranks.values() for hook in rank.hooks(first.key.module)})
    if hooks:
        evidence["comm_hooks"] = hooks
    return context.finding(
        RULE,
        f"At step {divergence.step} the gradients differ across ranks after DDP finished its reduction. "
        f"Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        stage=Stage.REDUCED.value,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause=divergence.cause
        + (f"; a communication hook is registered: {', '.join(hooks)}" if hooks else ""),
        fix="A communication hook must return the same result on every rank. Without a hook, suspect the memory or "
        "the network of the outlier: run it on another machine, and check its hardware.",
    )

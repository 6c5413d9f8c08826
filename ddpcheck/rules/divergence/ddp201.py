"""DDP201: parameters diverged, the general case."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import Divergence, Explanation, Precedence
from ddpcheck.analysis.divergence.nodes import node_findings
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP201",
    severity=Severity.ERROR,
    title="Parameters diverged",
    summary="parameters diverged: the first step and the elements",
    needs=(Need.PARAMETERS,),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
    # After the rules that name a cause.
    order=208.5,
)

_UNKNOWN = (
    "the update itself was not the same on every rank; most often gradients that were applied without being reduced (a "
    "forward through model.module, a backward under no_sync, an unused parameter)"
)
_FIX_UNKNOWN = (
    "Call the DDP wrapper itself in the training loop, and run every backward that is followed by a step outside "
    "no_sync()."
)
_SAME_GRADIENTS = (
    "the update itself was not the same on every rank: all applied the same gradients with the same hyperparameters, "
    "so the optimizer's state (momenta cleared or loaded on one rank), random numbers or arithmetic differ"
)
_FIX_SAME_GRADIENTS = (
    "Run again with --optimizer-state, which shows whether the optimizer's state differs before the step. Clear or "
    "load it on every rank, and draw random numbers inside a step from a generator with the same seed on every rank."
)


@RULE.explains_parameters(Precedence.UNEXPLAINED)
def _unexplained(attempt: Attempt, module: ModuleKey, first: Disagreement) -> Explanation:
    return Explanation()


def find(context: RuleContext) -> list[Finding]:
    findings = [_finding(context, divergence) for divergence in context.diverged_parameters(RULE)]
    return findings + node_findings(context, RULE, Stage.PARAMS)


def _finding(context: RuleContext, divergence: Divergence) -> Finding:
    first = divergence.first
    evidence = of_disagreement(context.attempt, first, context.folder)
    differing = evidence["parameters"]
    same_gradients = _same_gradients(context, divergence)
    return context.finding(
        RULE,
        f"Replicas diverge at step {divergence.step}: {differing['count']} of {differing['of']} parameters differ "
        f"across ranks after it, and all were bit-identical before. Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        parameter=differing["names"][0] if differing["names"] else None,
        evidence=evidence,
        cause=_SAME_GRADIENTS if same_gradients else _UNKNOWN,
        fix=_FIX_SAME_GRADIENTS if same_gradients else _FIX_UNKNOWN,
    )


def _same_gradients(context: RuleContext, divergence: Divergence) -> bool:
    """Whether all ranks are known to have applied the same gradients up to the divergence."""
    module = divergence.first.key.module
    applied = context.attempt.agreement.stats_of(module, Stage.APPLIED, TensorKind.GRADIENTS)
    return bool(applied.compared) and (applied.first is None or applied.first.key.step > divergence.step)

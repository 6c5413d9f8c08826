"""DDP201: parameters diverged, the general case."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import Divergence, Explanation, Precedence, node_findings
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
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
    "the update itself was not the same on every rank: all applied the same gradients, as far as they were read, with "
    "the same hyperparameters. So the optimizer's state (momenta cleared or loaded on one rank), random numbers or "
    "arithmetic differ; a write that was not seen and a memory error are possible too"
)
_OTHER_OPTIMIZERS = (
    "not known: other optimizers step parameters of the same module, and what they applied in between is not part of "
    "this comparison"
)
_FIX_OTHER_OPTIMIZERS = "Step every optimizer on all ranks, in the same order, and from reduced gradients."
_FIX_SAME_GRADIENTS = (
    "Run again with --optimizer-state, which shows whether the optimizer's state differs before the step. Clear or "
    "load it on every rank, and draw random numbers inside a step from a generator with the same seed on every rank. "
    "Large gradients are not read again between reduction and step unless their version or a sample of them changes: "
    "write to them by operations on the gradient itself, not through .data."
)
_FIX_NOT_COMPARED = (
    "Run again with --budget off, without --every and --sketch-every: then gradients and parameters of every step are "
    "compared, and the report names the stage at which ranks first differ."
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
    evidence |= divergence.compared_evidence()
    cause, fix = _cause(context, divergence)
    exact = divergence.agreed_until + 1 >= divergence.step
    return context.finding(
        RULE,
        f"Replicas diverge {divergence.when}: {differing['count']} of {differing['of']} parameters differ across ranks "
        f"after {'it' if exact else f'step {divergence.step}'}{_agreed(context, divergence)}. "
        f"Outlier: {name_ranks(first.outlier_ranks())}.",
        disagreement=first,
        parameter=differing["names"][0] if differing["names"] else None,
        evidence=evidence,
        cause=cause,
        fix=fix,
    )


def _agreed(context: RuleContext, divergence: Divergence) -> str:
    """What is known of the parameters before: that they were equal when they were last read."""
    module, until = divergence.first.key.module, divergence.agreed_until
    if until >= 0:
        others = ", before other optimizers stepped" if _has_other_optimizers(context, divergence) else ""
        return f"; when they were read after step {until}, all were bit-identical{others}"
    wrapped = context.attempt.agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.PARAMETERS)
    return "; after wrapping, all were bit-identical" if wrapped.compared else ""


def _has_other_optimizers(context: RuleContext, divergence: Divergence) -> bool:
    key = divergence.first.key
    return any(
        module == key.module and optimizer not in (key.optimizer, -1)
        for rank in context.attempt.ranks.values()
        for module, optimizer in rank.steps
    )


def _cause(context: RuleContext, divergence: Divergence) -> tuple[str, str]:
    """Cause and fix: whether all ranks applied the same gradients is known only if they were compared."""
    key = divergence.first.key
    applied = context.attempt.agreement.stats_of(key.module, Stage.APPLIED, TensorKind.GRADIENTS)
    if not applied.compared or (applied.first is not None and applied.first.key.step <= divergence.step):
        return _UNKNOWN, _FIX_UNKNOWN
    earliest = divergence.agreed_until + 1
    if _has_other_optimizers(context, divergence):
        return _OTHER_OPTIMIZERS, _FIX_OTHER_OPTIMIZERS
    if applied.agreed_from(earliest, key):
        return _SAME_GRADIENTS, _FIX_SAME_GRADIENTS
    steps = f"step {key.step}" if earliest == key.step else f"steps {earliest} to {key.step}"
    cause = f"not known: the gradients that the optimizer applied at {steps} were not all compared"
    later = context.divergence(key.module).later_gradients
    if later is not None:
        cause += f". At step {later.step} they were compared and differ: {later.cause}"
    return cause, _FIX_NOT_COMPARED

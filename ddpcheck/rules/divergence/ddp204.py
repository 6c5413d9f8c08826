"""DDP204: the reduced gradient is not the mean of the local ones."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.allreduce.collector import MeanCheckStats, MeanMismatch
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP204",
    severity=Severity.ERROR,
    title="The reduced gradient is not the mean of the local gradients",
    summary="the reduced gradient is not the mean of the local ones",
    needs=(Need.REDUCED_GRADIENTS,),
    location=Location.STEP,
    # After the rules that explain diverging gradients.
    order=205.5,
)

# Parts of the names of torch's hooks that trade precision for speed.
_LOSSY = ("compress", "powerSGD", "quantization")
# A user's hook that sends fewer bits has a smaller relative error. A wrong divisor or a missing rank has a larger one.
_LARGEST_LOSSY_ERROR = 2.0**-6


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for module in context.modules():
        checks = context.attempt.gradients.stats.get(module)
        if checks is None or checks.first is None or context.attempt.uses_local_sgd(module):
            continue
        known = context.divergence(module)
        divergence = known.gradients or known.later_gradients
        # If the gradients diverge, the mean is wrong as a consequence.
        if divergence is None or divergence.step > checks.first.step:
            findings.append(_finding(context, module, checks, checks.first))
    return findings


def _finding(context: RuleContext, module: ModuleKey, checks: MeanCheckStats, first: MeanMismatch) -> Finding:
    ranks = context.attempt.of_module(module)
    name = next(iter(ranks.values())).latest[module].parameters[first.index][0]
    hooks = sorted({hook for rank in ranks.values() for hook in rank.hooks(module)})
    lossy = bool(hooks) and (
        all(any(part in hook for part in _LOSSY) for hook in hooks)
        or checks.worst_relative < _LARGEST_LOSSY_ERROR
    )
    evidence = {
        "error": first.outcome.error,
        "bound": first.outcome.bound,
        "largest_relative_error": checks.worst_relative,
        "backwards": {"checked": checks.checked, "off": checks.mismatches},
        "comm_hooks": hooks,
    }
    if lossy:
        return context.finding(
            RULE,
            f"The communication hook {', '.join(hooks)} loses precision: reduced gradients deviate from the mean by "
            f"up to {checks.worst_relative:.2g} of their norm.",
            severity=Severity.NOTE,
            module=module,
            step=first.step,
            stage=Stage.REDUCED.value,
            parameter=name,
            evidence=evidence,
            cause="a compressing communication hook",
            fix="Nothing, if you chose the hook for its speed.",
        )
    return context.finding(
        RULE,
        f"At step {first.step} the reduced gradient of {name} is not the mean of the local gradients: the error is "
        f"{first.outcome.error:.3g}, and rounding explains at most {first.outcome.bound:.3g}.",
        module=module,
        step=first.step,
        stage=Stage.REDUCED.value,
        parameter=name,
        ranks=tuple(sorted(ranks)),
        evidence=evidence,
        cause=_cause(hooks, checks.actual),
        fix="In a communication hook, divide once by the size of the group and by nothing else. Without a hook, "
        "suspect the network or the memory of a rank.",
    )


def _cause(hooks: list[str], actual: str) -> str:
    source = f"the communication hook {', '.join(hooks)}" if hooks else "the reduction itself"
    return f"{source} returned {actual}" if actual else source

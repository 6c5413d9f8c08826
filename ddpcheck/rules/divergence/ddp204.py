"""DDP204: the reduced gradient is not the mean of the local ones."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.allreduce.collector import MeanCheckStats, MeanMismatch
from ddpcheck.analysis.allreduce.contributions import Contribution
from ddpcheck.analysis.collectors.manual_reduction import ManualReductionCollector, ManualReductionStats
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.sharding.collector import ReductionStats, ShardReductionCollector
from ddpcheck.formatting import name_ranks
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
# Errors cancel if, over this many backwards, the relative error of the sum is at most this share of a single one's.
_FEWEST_BACKWARDS = 8
# Steps: a job may scale the gradients of a single one so by chance.
_FEWEST_DIVIDED_TWICE = 3
_LARGEST_SUM_ERROR = 0.5


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for module in context.modules():
        checks = context.attempt.gradients.stats.get(module)
        if checks is None or context.attempt.uses_local_sgd(module):
            continue
        known = context.divergence(module)
        divergence = known.gradients or known.later_gradients
        # If the gradients diverge, the mean is wrong as a consequence.
        if checks.first is not None and (divergence is None or divergence.step > checks.first.step):
            findings.append(_finding(context, module, checks, checks.first))
        elif checks.contribution is not None and (
            divergence is None or divergence.step > checks.contribution.last_step
        ):
            findings.append(_contribution_finding(context, module, checks, checks.contribution))
    findings += [
        _of_shards(context, stats, ranks, custom)
        for (ranks, custom), stats in context.attempt.collector(ShardReductionCollector).stats.items()
        if stats.wrong
    ]
    for module, by_hand in context.attempt.collector(ManualReductionCollector).stats.items():
        if by_hand.sums > max(by_hand.means, by_hand.divided_twice):
            findings.append(_sum_by_hand(context, module, by_hand))
        elif by_hand.divided_twice >= _FEWEST_DIVIDED_TWICE and not by_hand.means:
            findings.append(_divided_twice_by_hand(context, module, by_hand))
    return findings


def _sum_by_hand(context: RuleContext, module: ModuleKey, stats: ManualReductionStats) -> Finding:
    """A sum is right for a loss that the job divides by the number of ranks, or by the samples of all ranks."""
    ranks = context.attempt.of_module(module)
    size = len(ranks)
    return context.finding(
        RULE,
        f"From step {stats.first_sum} on, the optimizer applies the sum of the gradients of {size} ranks, not their "
        f"mean: {size} times the mean of the local gradients."
        + ("" if stats.own_mean else " This is right if the loss is divided accordingly."),
        severity=Severity.WARNING if stats.own_mean else Severity.NOTE,
        step=stats.first_sum,
        stage=Stage.APPLIED.value,
        ranks=tuple(sorted(ranks)),
        evidence={"steps": {"sum": stats.sums, "mean": stats.means}, "loss_is_a_mean": stats.own_mean},
        cause="the job reduces gradients itself and applies the sum over ranks, not divided by their number"
        + (", although the loss is a mean over the rank's own batch" if stats.own_mean else ""),
        fix="Divide the gradients by the number of ranks after the all_reduce, or use ReduceOp.AVG."
        if stats.own_mean
        else "Nothing, if the loss is divided by the number of ranks, or by the samples of all ranks.",
    )


def _divided_twice_by_hand(context: RuleContext, module: ModuleKey, stats: ManualReductionStats) -> Finding:
    ranks = context.attempt.of_module(module)
    size = len(ranks)
    return context.finding(
        RULE,
        f"From step {stats.first_divided_twice} on, the optimizer applies the mean of the gradients of {size} ranks "
        f"divided by {size} again.",
        severity=Severity.WARNING,
        step=stats.first_divided_twice,
        stage=Stage.APPLIED.value,
        ranks=tuple(sorted(ranks)),
        evidence={"steps": {"divided_twice": stats.divided_twice}, "loss_is_a_mean": True},
        cause="the job reduces gradients itself and divides by the number of ranks twice",
        fix="Divide once: ReduceOp.AVG divides already.",
    )


def _finding(context: RuleContext, module: ModuleKey, checks: MeanCheckStats, first: MeanMismatch) -> Finding:
    ranks = context.attempt.of_module(module)
    name = next(iter(ranks.values())).latest[module].parameters[first.index][0]
    hooks = sorted({hook for rank in ranks.values() for hook in rank.hooks(module)})
    feedback = bool(hooks) and not checks.actual and _errors_cancel(checks)
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
    if feedback and not lossy:
        evidence["error_sum"] = {
            "backwards": checks.errors.backwards,
            "relative_error": checks.errors.single,
            "relative_error_of_sum": checks.errors.summed,
        }
        return context.finding(
            RULE,
            f"The communication hook {', '.join(hooks)} compresses gradients and makes up for it later: single results "
            f"deviate from the mean by {checks.errors.single:.2g} of it, their sum over {checks.errors.backwards} "
            f"backwards by {checks.errors.summed:.2g}.",
            severity=Severity.NOTE,
            module=module,
            step=first.step,
            stage=Stage.REDUCED.value,
            parameter=name,
            evidence=evidence,
            cause="a compressing communication hook that adds what it left out to the next gradient",
            fix="Nothing, if you chose the hook for its speed.",
        )
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
        ranks=_outlier_ranks(checks) if len(ranks) > 2 and _outlier_ranks(checks) else tuple(sorted(ranks)),
        evidence=evidence,
        cause=_cause(hooks, checks, len(module[0])),
        fix="In a communication hook, divide once by the size of the group and by nothing else. Without a hook, "
        "suspect the network or the memory of a rank.",
    )


def _contribution_finding(
    context: RuleContext, module: ModuleKey, checks: MeanCheckStats, contribution: Contribution
) -> Finding:
    """No single result exceeds the rounding bound, but the errors of several together follow a rank's gradients."""
    hooks = sorted(
        {hook for rank in context.attempt.of_module(module).values() for hook in rank.hooks(module)}
    )
    source = f"the communication hook {', '.join(hooks)}" if hooks else "the reduction itself"
    named = name_ranks(contribution.ranks) if contribution.ranks else "one rank"
    what = "are missing from" if contribution.missing else "are counted twice in"
    return context.finding(
        RULE,
        f"From step {contribution.first_step} to step {contribution.last_step}, the gradients of {named} {what} the "
        f"reduced gradients. Each single error is within the rounding bound of {len(module[0])} ranks. But together "
        "they have the pattern of these gradients, which rounding does not have: their share in the mean is "
        f"{contribution.share:.2f} "
        f"instead of 1 ({contribution.deviations:.0f} standard deviations)."
        + (
            ""
            if contribution.ranks
            else " The gradients of the ranks are too similar to tell which rank it is."
        ),
        module=module,
        step=contribution.first_step,
        stage=Stage.REDUCED.value,
        ranks=contribution.ranks or tuple(sorted(module[0])),
        evidence={
            "share": contribution.share,
            "deviations": contribution.deviations,
            "steps": [contribution.first_step, contribution.last_step],
            "backwards": {"checked": checks.checked, "evaluated": contribution.reductions},
            "observations": contribution.observations,
            "comm_hooks": hooks,
        },
        cause=_contribution_cause(source, contribution, len(module[0])),
        fix="Check the communication hook, the process group and the network of that rank: its gradients do not reach "
        "the others."
        if contribution.missing
        else "Check the communication hook: it adds the gradients of that rank more than once.",
    )


def _of_shards(context: RuleContext, stats: ReductionStats, ranks: tuple[int, ...], custom: str) -> Finding:
    """FSDP2's reduction: the shards that the ranks received, together, are not the mean of the local gradients."""
    worst, (phrase, missing) = stats.worst(), stats.actual()
    lossy = bool(custom) and not phrase and stats.worst_relative < _LARGEST_LOSSY_ERROR
    source = f"the reduce-scatter of the job, {custom}," if custom else "the reduction itself"
    step, name = worst.step, worst.parameter.name
    evidence = {
        "error": worst.outcome.error,
        "bound": worst.outcome.bound,
        "largest_relative_error": stats.worst_relative,
        "reductions": {"checked": stats.checked, "off": stats.mismatches},
        "reduce_scatter": custom,
    }
    if lossy:
        message = (
            f"{custom} loses precision: reduced shards deviate from the mean by up to "
            f"{stats.worst_relative:.2g} of its norm."
        )
        cause, fix = "a compressing reduce-scatter", "Nothing, if you chose it for its speed."
    else:
        message = (
            f"At step {step} the shards of the gradient of {name} that the ranks received are not the mean of the "
            f"local gradients: the error is {worst.outcome.error:.3g}, and rounding explains at most "
            f"{worst.outcome.bound:.3g}."
        )
        cause = f"{source} returned {phrase}" if phrase else source.removesuffix(",")
        fix = (
            "In the implementation that set_custom_reduce_scatter or register_comm_hook was given, reduce over all "
            "ranks of its group. A communication hook of FSDP1 divides by their number, a reduce-scatter of FSDP2 "
            "does not."
            if custom
            else "Suspect the network or the memory of a rank."
        )
    return context.finding(
        RULE,
        message,
        severity=Severity.NOTE if lossy else None,
        step=step,
        stage=Stage.REDUCED.value,
        parameter=name,
        ranks=ranks if missing is None else (missing,),
        evidence=evidence,
        cause=cause,
        fix=fix,
    )


def _errors_cancel(checks: MeanCheckStats) -> bool:
    errors = checks.errors
    return errors.backwards >= _FEWEST_BACKWARDS and errors.summed <= _LARGEST_SUM_ERROR * errors.single


def _outlier_ranks(checks: MeanCheckStats) -> tuple[int, ...]:
    """The ranks that are missing from the mean, if that is what is wrong. Of two ranks, either could be."""
    if checks.actual:
        return () if checks.actual_rank is None else (checks.actual_rank,)
    return checks.contribution.ranks if checks.contribution is not None else ()


def _cause(hooks: list[str], checks: MeanCheckStats, size: int) -> str:
    source = f"the communication hook {', '.join(hooks)}" if hooks else "the reduction itself"
    if checks.actual:
        return f"{source} returned {checks.actual}"
    return source if checks.contribution is None else _contribution_cause(source, checks.contribution, size)


def _contribution_cause(source: str, contribution: Contribution, size: int) -> str:
    named = name_ranks(contribution.ranks) if contribution.ranks else "a rank"
    enters = "does not enter" if contribution.missing else "enters twice"
    return f"{source}: the gradient of {named} {enters} the mean of {size} ranks"

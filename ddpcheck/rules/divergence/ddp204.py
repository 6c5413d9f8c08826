"""DDP204: the reduced gradient is not the mean of the local ones."""

from __future__ import annotations

from ddpcheck.analysis.allreduce.verify import MeanCheckStats
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.stages import explained_by_stage
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage

# In the names of torch's own hooks that trade precision for speed.
_LOSSY = ("compress", "powerSGD", "quantization")
# A hook of the user's that sends fewer bits is off by less; one that divides wrongly or leaves a rank out, by more.
_FEWER_BITS = 2.0**-6


def find(case: RuleContext) -> list[Finding]:
    findings = []
    for module in case.modules():
        tally = case.attempt.gradients.tallies.get(module)
        if tally is None or tally.first is None or case.attempt.uses_local_sgd(module):
            continue
        parted = explained_by_stage(case, module)
        # Ranks that part are told of by what parts them; the mean is then wrong somewhere as a matter of course.
        if parted is not None and parted.found.moment.step <= tally.first.step:
            continue
        findings.append(_finding(case, module, tally))
    return findings


def _finding(case: RuleContext, module: ModuleKey, tally: MeanCheckStats) -> Finding:
    first = tally.first
    assert first is not None
    ranks = case.attempt.of_module(module)
    name = next(iter(ranks.values())).latest[module].parameters[first.place][0]
    hooks = sorted({hook for rank in ranks.values() for hook in rank.hooks(module)})
    lossy = bool(hooks) and (
        all(any(part in hook for part in _LOSSY) for hook in hooks) or tally.worst_relative < _FEWER_BITS
    )
    evidence = {
        "error": first.outcome.error,
        "bound": first.outcome.bound,
        "largest_relative_error": tally.worst_relative,
        "backwards": {"checked": tally.checked, "off": tally.missed},
        "comm_hooks": hooks,
    }
    if lossy:
        return case.finding(
            "DDP204",
            f"The communication hook {', '.join(hooks)} loses precision, as it is meant to: reduced gradients are off "
            f"the mean by up to {tally.worst_relative:.2g} of their norm.",
            severity=Severity.NOTE,
            module=module,
            step=first.step,
            stage=Stage.REDUCED.value,
            parameter=name,
            evidence=evidence,
            cause="a compressing communication hook",
            fix="Nothing, if you chose the hook for its speed.",
        )
    return case.finding(
        "DDP204",
        f"At step {first.step} the reduced gradient of {name} is not the mean of what the ranks computed: off by "
        f"{first.outcome.error:.3g} where rounding explains {first.outcome.bound:.3g} at most.",
        module=module,
        step=first.step,
        stage=Stage.REDUCED.value,
        parameter=name,
        ranks=tuple(sorted(ranks)),
        evidence=evidence,
        cause=_cause(hooks, tally.instead),
        fix="In a communication hook divide once by the size of the group, and by nothing else. Without a hook, "
        "suspect the network or the memory of a rank.",
    )


def _cause(hooks: list[str], instead: str) -> str:
    who = f"the communication hook {', '.join(hooks)}" if hooks else "the reduction itself"
    return f"{who} gave {instead}" if instead else who

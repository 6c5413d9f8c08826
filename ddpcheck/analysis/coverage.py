"""What was looked at in an attempt, for the part of the report that tells what its verdict rests on."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.collector import NodesCollector
from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.report import Check
from ddpcheck.records.kinds.digests import Stage, TensorKind

_LOOKS = (
    ("parameters after wrapping", Stage.INIT_AFTER, TensorKind.PARAMETERS),
    ("buffers after wrapping", Stage.INIT_AFTER, TensorKind.BUFFERS),
    ("buffers after each synchronisation", Stage.BUFFERS, TensorKind.BUFFERS),
    ("parameters after each step", Stage.PARAMS, TensorKind.PARAMETERS),
    ("gradients as applied", Stage.APPLIED, TensorKind.GRADIENTS),
    ("optimizer state", Stage.STATE, TensorKind.STATE),
)


def checks_of(attempt: Attempt) -> tuple[Check, ...]:
    """One line for each kind of look, over all modules."""
    if not attempt.ranks:
        return ()
    checks = [_check(attempt, name, stage, of) for name, stage, of in _LOOKS]
    return (*checks, _means(attempt), _hyper(attempt), *_across_nodes(attempt))


def _across_nodes(attempt: Attempt) -> list[Check]:
    """Only where ranks of other nodes have written elsewhere: else all are compared here, and better."""
    away = attempt.elsewhere.keys() - attempt.ranks.keys()
    if not away:
        return []
    name = "all of these with other nodes, through the job's store"
    if any(first_node_mismatch(attempt, module) is not None for module in attempt.modules()):
        return [Check(name, attempt.collector(NodesCollector).compared, "differ")]
    if not attempt.collector(NodesCollector).compared:
        return [Check(name, 0, "not checked", "the job ended before it came to that")]
    detail = f"{attempt.collector(NodesCollector).compared} looks, {len(away)} ranks on other nodes"
    return [Check(name, attempt.collector(NodesCollector).compared, "agree", detail)]


def _check(attempt: Attempt, name: str, stage: Stage, of: TensorKind) -> Check:
    tallies = [
        (module, tally)
        for (module, found_stage, found_of), tally in attempt.agreement.stats.items()
        if (found_stage, found_of) == (stage.value, of.value)
        and not (stage is Stage.PARAMS and attempt.uses_local_sgd(module))
    ]
    compared = sum(tally.compared for _, tally in tallies)
    if not compared:
        return Check(name, 0, "not checked", _why_not(attempt, stage))
    differing = sum(tally.differing for _, tally in tallies)
    tensors = sum(_tensors(attempt, module, of) for module, _ in tallies)
    what = "buffers" if of is TensorKind.BUFFERS else "parameters"
    detail = f"{compared} x {attempt.world_size} ranks, {tensors} {what}"
    if differing:
        detail += f", {differing} differ"
    return Check(name, compared, "differ" if differing else "agree", detail)


def _tensors(attempt: Attempt, module: tuple[tuple[int, ...], int], of: TensorKind) -> int:
    records = [rank.latest[module] for rank in attempt.of_module(module).values()]
    return max((len(r.buffers if of is TensorKind.BUFFERS else r.parameters) for r in records), default=0)


def _why_not(attempt: Attempt, stage: Stage) -> str:
    if len({rank.header.algorithm for rank in attempt.ranks.values()}) > 1:
        return (
            "ranks hash in different ways (is xxhash installed on some only?): set DDPCHECK_HASH=multilinear"
        )
    if attempt.world_size == 1:
        return "one rank has nobody to agree with"
    if len(attempt.ranks) == 1 and attempt.elsewhere:
        return "the other ranks' records are in other run folders"
    if stage is Stage.PARAMS and any(rank.local_sgd for rank in attempt.ranks.values()):
        return "post-localSGD lets replicas differ between averagings"
    reasons = {
        Stage.APPLIED: "no backward that DDP reduced was seen",
        Stage.BUFFERS: "no buffers, or DDP does not synchronise them",
        Stage.INIT_AFTER: "there were none",
        Stage.PARAMS: "no step was taken",
        Stage.STATE: "none before the first step; --optimizer-state looks at every step",
    }
    return reasons.get(stage, "")


def _means(attempt: Attempt) -> Check:
    name = "reduced gradients against the mean"
    tallies = attempt.gradients.tallies
    checked = sum(tally.checked for tally in tallies.values())
    if not checked:
        return Check(name, 0, "not checked", _why_not(attempt, Stage.APPLIED))
    missed = sum(tally.missed for tally in tallies.values())
    tensors = sum(_tensors(attempt, module, TensorKind.PARAMETERS) for module in tallies)
    detail = f"{checked} backwards x {attempt.world_size} ranks, {tensors} parameters"
    return Check(
        name, checked, "differ" if missed else "agree", detail + (f", {missed} off" if missed else "")
    )


def _hyper(attempt: Attempt) -> Check:
    compared = sum(
        tally.compared
        for (_, stage, _), tally in attempt.agreement.stats.items()
        if stage == Stage.PARAMS.value
    )
    name = "optimizer hyperparameters, scale and step counts"
    if not compared:
        return Check(name, 0, "not checked", _why_not(attempt, Stage.PARAMS))
    differ = bool(attempt.agreement.hyper)
    return Check(name, compared, "differ" if differ else "agree", f"{compared} x {attempt.world_size} ranks")

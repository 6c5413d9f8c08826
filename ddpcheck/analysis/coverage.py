"""Coverage: what was compared in an attempt, how often, and why not; and the environments of the ranks."""

from __future__ import annotations

from dataclasses import replace

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.collector import NodesCollector
from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.devices.collector import DeviceCollector
from ddpcheck.analysis.report import Check
from ddpcheck.analysis.timeseries.model import EnvironmentRow, EnvironmentValue
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.rank import DeviceRecord

_COMPARISONS = (
    ("parameters after wrapping", Stage.INIT_AFTER, TensorKind.PARAMETERS),
    ("buffers after wrapping", Stage.INIT_AFTER, TensorKind.BUFFERS),
    ("buffers after each synchronisation", Stage.BUFFERS, TensorKind.BUFFERS),
    ("parameters after each step", Stage.PARAMS, TensorKind.PARAMETERS),
    ("gradients as applied", Stage.APPLIED, TensorKind.GRADIENTS),
    ("optimizer state", Stage.STATE, TensorKind.STATE),
)
_MEANS = "reduced gradients against the mean"
_HYPER = "optimizer hyperparameters, scale and step counts"


def checks_of(attempt: Attempt) -> tuple[Check, ...]:
    """One check for each kind of comparison, over all modules."""
    if not attempt.ranks:
        return ()
    checks = [_check(attempt, name, stage, of) for name, stage, of in _COMPARISONS]
    left_out = attempt.collector(CostCollector).left_out()
    by_name = {
        _COMPARISONS[3][0]: left_out.params,
        _COMPARISONS[4][0]: left_out.applied,
        _MEANS: left_out.allreduce,
        _HYPER: left_out.params,
    }
    every = (*checks, _means(attempt), _hyper(attempt))
    return (
        *(replace(check, steps_left_out=by_name.get(check.name, 0)) for check in every),
        *_captured(attempt),
        *_on_devices(attempt),
        *_across_nodes(attempt),
    )


def _captured(attempt: Attempt) -> list[Check]:
    """What ran inside graphs: no hook runs in a replay, so it is not part of any other check."""
    graph = attempt.collector(DeviceCollector).captured()
    if graph is None or not graph.captures:
        return []
    replayed = f"{graph.replayed_steps} steps and {graph.replayed_backwards} backwards replayed"
    detail = f"captured in a graph: {graph.captures} graphs, {graph.replays} replays, {replayed}"
    return [Check("steps inside graphs", 0, "not checked", detail)]


def _beside_graphs(attempt: Attempt) -> str:
    """Says in the detail of a check that it covers the steps outside of graphs only."""
    graph = attempt.collector(DeviceCollector).captured()
    return ", outside of graphs only" if graph is not None and graph.captures else ""


# By the names in the records.
_LACKS = {
    "clock": ("device time of each step", "no events"),
    "memory": ("memory on the device", "no statistics of its allocator"),
    "random": ("random numbers drawn on the device", "no generators"),
    "capture": ("captures into graphs", "torch does not report them"),
}


def _on_devices(attempt: Attempt) -> list[Check]:
    """What is checked on the CPU only, and what a device cannot do."""
    devices = [
        record for records in attempt.collector(DeviceCollector).devices.values() for record in records
    ]
    if not devices:
        return []
    reason = f"not sampled on {_types(devices)}"
    checks = [Check("writes through .data between steps", 0, "not checked", reason)]
    if not any(stats.checked for stats in attempt.gradients.stats.values()):
        checks.append(Check("non-finite gradients", 0, "not checked", "gradients were not sketched"))
    for lack, (name, why) in _LACKS.items():
        lacking = [record for record in devices if lack in record.missing]
        if lacking:
            checks.append(Check(name, 0, "not checked", f"torch's {_types(lacking)} module: {why}"))
    return checks


def _types(devices: list[DeviceRecord]) -> str:
    return ", ".join(sorted({record.device.partition(":")[0] for record in devices}))


def _across_nodes(attempt: Attempt) -> list[Check]:
    """Only if ranks of other nodes write to other folders: otherwise the analysis compares all ranks."""
    away = attempt.elsewhere.keys() - attempt.ranks.keys()
    if not away:
        return []
    name = "all of these with other nodes, through the job's store"
    if any(first_node_mismatch(attempt, module) is not None for module in attempt.modules()):
        return [Check(name, attempt.collector(NodesCollector).compared, "differ")]
    if not attempt.collector(NodesCollector).compared:
        return [Check(name, 0, "not checked", "the job ended before the first comparison")]
    detail = f"{attempt.collector(NodesCollector).compared} digests, {len(away)} ranks on other nodes"
    return [Check(name, attempt.collector(NodesCollector).compared, "agree", detail)]


def _check(attempt: Attempt, name: str, stage: Stage, of: TensorKind) -> Check:
    results = [
        (module, stats)
        for (module, compared_stage, compared_of), stats in attempt.agreement.stats.items()
        if (compared_stage, compared_of) == (stage.value, of.value)
        and not (stage is Stage.PARAMS and attempt.uses_local_sgd(module))
    ]
    compared = sum(stats.compared for _, stats in results)
    if not compared:
        return Check(name, 0, "not checked", _why_not(attempt, stage))
    differing = sum(stats.differing for _, stats in results)
    tensors = sum(_tensors(attempt, module, of) for module, _ in results)
    what = "buffers" if of is TensorKind.BUFFERS else "parameters"
    detail = f"{compared} x {attempt.world_size} ranks, {tensors} {what}"
    if differing:
        detail += f", {differing} differ"
    if stage in (Stage.PARAMS, Stage.APPLIED):
        detail += _beside_graphs(attempt)
    return Check(name, compared, "differ" if differing else "agree", detail)


def _tensors(attempt: Attempt, module: tuple[tuple[int, ...], int], of: TensorKind) -> int:
    records = [rank.latest[module] for rank in attempt.of_module(module).values()]
    return max((len(r.buffers if of is TensorKind.BUFFERS else r.parameters) for r in records), default=0)


def _why_not(attempt: Attempt, stage: Stage) -> str:
    if len({rank.header.algorithm for rank in attempt.ranks.values()}) > 1:
        return "ranks use different hash algorithms (is xxhash installed on some only?): set DDPCHECK_HASH=multilinear"
    graph = attempt.collector(DeviceCollector).captured()
    if graph is not None and graph.captures and stage in (Stage.PARAMS, Stage.APPLIED):
        return "captured in a graph"
    if attempt.world_size == 1:
        return "the job has one rank"
    if len(attempt.ranks) == 1 and attempt.elsewhere:
        return "the other ranks' records are in other run folders"
    if stage is Stage.PARAMS and any(rank.local_sgd for rank in attempt.ranks.values()):
        return "post-localSGD lets replicas differ between averagings"
    reasons = {
        Stage.APPLIED: "DDP reduced no backward",
        Stage.BUFFERS: "no buffers, or DDP does not synchronise them",
        Stage.INIT_AFTER: "the modules have none",
        Stage.PARAMS: "the optimizer took no step",
        Stage.STATE: "none before the first step; --optimizer-state checks every step",
    }
    return reasons.get(stage, "")


def _means(attempt: Attempt) -> Check:
    name = _MEANS
    results = attempt.gradients.stats
    checked = sum(stats.checked for stats in results.values())
    if not checked:
        return Check(name, 0, "not checked", _why_not(attempt, Stage.APPLIED))
    mismatches = sum(stats.mismatches for stats in results.values())
    tensors = sum(_tensors(attempt, module, TensorKind.PARAMETERS) for module in results)
    detail = f"{checked} backwards x {attempt.world_size} ranks, {tensors} parameters"
    return Check(
        name,
        checked,
        "differ" if mismatches else "agree",
        detail + (f", {mismatches} off" if mismatches else "") + _beside_graphs(attempt),
    )


def _hyper(attempt: Attempt) -> Check:
    compared = sum(
        stats.compared
        for (_, stage, _), stats in attempt.agreement.stats.items()
        if stage == Stage.PARAMS.value
    )
    name = _HYPER
    if not compared:
        return Check(name, 0, "not checked", _why_not(attempt, Stage.PARAMS))
    differ = bool(attempt.agreement.hyper)
    return Check(name, compared, "differ" if differ else "agree", f"{compared} x {attempt.world_size} ranks")


_FIELDS = {"python": "Python", "torch": "torch", "backend": "backend", "algorithm": "digests"}
# These differ on every rank.
PER_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"})
MOST_VALUES = 8


def environment_rows(attempt: Attempt) -> tuple[EnvironmentRow, ...]:
    """For each property, ranks grouped by value, the most common value first."""
    headers = {rank: data.header for rank, data in attempt.ranks.items()}
    values = {
        title: {rank: str(getattr(header, field)) for rank, header in headers.items()}
        for field, title in _FIELDS.items()
    }
    # Only the type of the device: cuda:0 to cuda:7 are equal.
    values["device"] = {rank: header.device.partition(":")[0] for rank, header in headers.items()}
    values["hosts"] = {rank: header.host for rank, header in headers.items()}
    names = sorted({name for header in headers.values() for name in header.environment} - PER_RANK)
    for name in names:
        values[name] = {rank: header.environment.get(name, "") for rank, header in headers.items()}
    return tuple(
        EnvironmentRow(
            name, tuple(EnvironmentValue(value, ranks) for value, ranks in groups_of(by_rank)[:MOST_VALUES])
        )
        for name, by_rank in values.items()
        if by_rank
    )

"""Coverage: what was compared in an attempt, how often, and why not; and the environments of the ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.collector import NodesCollector
from ddpcheck.analysis.aggregate.launch import Attempt, first_node_mismatch
from ddpcheck.analysis.aggregate.rank_data import is_sharded, is_sharded_root
from ddpcheck.analysis.audit.collector import AuditCollector
from ddpcheck.analysis.audit.judgement import SKIP_TEXTS, judge
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.report import Check
from ddpcheck.analysis.sharding.collector import ShardReductionCollector
from ddpcheck.analysis.sharding.mesh import parameters_of
from ddpcheck.analysis.sharding.settings import (
    described_differently,
    settings_differences,
    shard_optimizers,
    shard_steps,
    unreplicated,
)
from ddpcheck.analysis.step_coverage.build import coverage_of
from ddpcheck.analysis.step_coverage.text import optimizer_text, reasons_text
from ddpcheck.analysis.timeseries.model import EnvironmentRow, EnvironmentValue
from ddpcheck.formatting import counted
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.modules import PYTHON_REDUCER
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
AUDIT_CHECK = "local gradients computed again by other ranks"
_HYPER = "optimizer hyperparameters, scale and step counts"


def checks_of(attempt: Attempt) -> tuple[Check, ...]:
    """One check for each kind of comparison, over all modules."""
    if not attempt.ranks:
        return ()
    checks = [_check(attempt, name, stage, of) for name, stage, of in _COMPARISONS]
    left_out = attempt.collector(CostCollector).left_out()
    by_name = {
        _COMPARISONS[2][0]: left_out.params,
        _COMPARISONS[3][0]: left_out.params,
        _COMPARISONS[4][0]: left_out.applied,
        _MEANS: left_out.allreduce,
        _HYPER: left_out.params,
    }
    every = (*checks, _means(attempt), _hyper(attempt))
    return (
        *(replace(check, steps_left_out=by_name.get(check.name, 0)) for check in every),
        *_audit(attempt),
        *_not_compared(attempt),
        *_of_shards(attempt),
        *_captured(attempt),
        *_on_devices(attempt),
        *_across_nodes(attempt),
    )


def _audit(attempt: Attempt) -> list[Check]:
    """Only with --audit."""
    stats = list(attempt.collector(AuditCollector).stats.values())
    if not stats:
        return []
    rounds, audited = sum(each.rounds for each in stats), sum(each.audited for each in stats)
    skipped = sum((each.skipped for each in stats), Counter())
    reasons = ", ".join(
        f"{SKIP_TEXTS.get(reason, reason)} ({count})" for reason, count in skipped.most_common(3)
    )
    if not audited:
        return [Check(AUDIT_CHECK, 0, "not checked", reasons)]
    judgements = [judge(each) for each in stats]
    named = sum(len(outlier.rounds) for each in judgements for outlier in each.outliers)
    unexplained = sum(each.unexplained for each in judgements)
    outcome = "differ" if named else "agree" if any(each.agreeing for each in stats) else "not checked"
    milliseconds = sum(each.microseconds for each in stats) / 1000 / rounds
    detail = f"{audited} micro-batches at {counted(rounds, 'step')}, {milliseconds:.3g} ms each"
    if named:
        detail += f", {named} with a wrong gradient"
    if unexplained:
        detail += f", {unexplained} not reproducible: the forward depends on more than what is handed over"
    excluded = sum(len(each.excluded or ()) for each in stats)
    if excluded:
        detail += (
            f", without {counted(excluded, 'parameter')} whose gradient does not come from the outputs alone"
        )
    if reasons:
        detail += f"; skipped: {reasons}"
    return [Check(AUDIT_CHECK, audited if outcome != "not checked" else 0, outcome, detail)]


def _not_compared(attempt: Attempt) -> list[Check]:
    """One row for each optimizer that steps parameters which are not compared after each step."""
    if attempt.world_size == 1:
        return []
    return [
        Check(
            f"parameters of {optimizer_text(optimizer)}",
            0,
            "not checked",
            f"{reasons_text(optimizer.not_compared)}; {optimizer.compared} compared, {optimizer.steps} steps",
        )
        for optimizer in coverage_of(attempt).optimizers
        if optimizer.not_compared
    ]


def _of_shards(attempt: Attempt) -> list[Check]:
    """What ranks must have in common in a job that shards parameters, and what is not checked there."""
    optimizers = shard_optimizers(attempt)
    if not optimizers:
        return []
    steps = shard_steps(attempt)
    described = [described_differently(attempt, module) for module in unreplicated(attempt)]
    differ = (
        bool(settings_differences(attempt))
        or any(described)
        or any(len(set(of_rank.values())) > 1 for of_rank in steps.values())
    )
    ranks = max(map(len, optimizers.values()))
    return [
        Check(
            "settings of optimizers that step shards",
            len(optimizers),
            "differ" if differ else "agree",
            f"{ranks} ranks: hyperparameters, step counts, names, dtypes and shapes",
        ),
        _shard_reductions(attempt),
        *_root_buffers(attempt),
        *_root_forwards(attempt),
    ]


def _root_buffers(attempt: Attempt) -> list[Check]:
    """FSDP does not synchronise buffers, so those of ranks may differ."""
    roots = attempt.sharded_roots()
    compared = [
        stats
        for module in roots
        for stage in (Stage.INIT_AFTER, Stage.BUFFERS_END)
        if (stats := attempt.agreement.stats_of(module, stage, TensorKind.BUFFERS)).compared
    ]
    if not compared:
        return []
    buffers = sum(_tensors(attempt, module, TensorKind.BUFFERS) for module in roots)
    differ = any(stats.first is not None for stats in compared)
    detail = f"{counted(buffers, 'buffer')}, before the first forward and at the end"
    return [Check("buffers of sharded modules", len(compared), "differ" if differ else "agree", detail)]


def _root_forwards(attempt: Attempt) -> list[Check]:
    """Which comparisons of DDP's forwards those of sharded modules are part of."""
    forwards = sum(attempt.data.of(module).forwards for module in attempt.sharded_roots())
    if not forwards:
        return []
    detail = f"{counted(forwards, 'forward')}: batches, random numbers, modes and settings"
    return [Check("forwards of sharded modules", forwards, "compared", detail)]


def _shard_reductions(attempt: Attempt) -> Check:
    name = "reduction of sharded gradients"
    results = list(attempt.collector(ShardReductionCollector).stats.values())
    checked = sum(stats.checked for stats in results)
    if not checked:
        why = "nothing shows the whole gradients before"
        return Check(name, 0, "not checked", why)
    steps = len({step for stats in results for step in stats.steps})
    parameters = len({parameter for stats in results for parameter in stats.parameters})
    mismatches = sum(stats.mismatches for stats in results)
    detail = f"{parameters} parameters at {counted(steps, 'step')}" + (
        f", {mismatches} off" if mismatches else ""
    )
    return Check(name, checked, "differ" if mismatches else "agree", detail)


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
        and not is_sharded_root(module)
        and not (stage is Stage.PARAMS and attempt.uses_local_sgd(module))
    ]
    compared = sum(stats.compared for _, stats in results)
    if not compared:
        return Check(name, 0, "not checked", _why_not(attempt, stage))
    differing = sum(stats.differing for _, stats in results)
    modules = [module for module, _ in results]
    buffers = of is TensorKind.BUFFERS
    tensors = (
        sum(_tensors(attempt, module, of) for module in modules)
        if buffers
        else parameters_of(attempt, modules)
    )
    # Only the ranks with the same shards are compared with each other.
    sharded = all(map(is_sharded, modules))
    ranks = max(len(module[0]) for module in modules) if sharded else attempt.world_size
    detail = f"{compared} x {ranks} ranks, {tensors} {'buffers' if buffers else 'parameters'}"
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
        Stage.PARAMS: _why_no_step(attempt),
        Stage.STATE: "none before the first step; --optimizer-state checks every step",
    }
    return reasons.get(stage, "")


def _why_no_step(attempt: Attempt) -> str:
    if any(map(attempt.steps, attempt.ranks)):
        return "the stepped parameters are in no module that is compared"
    return "no optimizer step was seen"


def _means(attempt: Attempt) -> Check:
    name = _MEANS
    results = attempt.gradients.stats
    checked = sum(stats.checked for stats in results.values())
    if not checked:
        return Check(name, 0, "not checked", _why_no_means(attempt))
    mismatches = sum(stats.mismatches for stats in results.values())
    tensors = sum(_tensors(attempt, module, TensorKind.PARAMETERS) for module in results)
    detail = f"{checked} backwards x {attempt.world_size} ranks, {tensors} parameters"
    return Check(
        name,
        checked,
        "differ" if mismatches else "agree",
        detail + (f", {mismatches} off" if mismatches else "") + _beside_graphs(attempt),
    )


def _why_no_means(attempt: Attempt) -> str:
    modules = [
        rank.latest[module] for module in attempt.modules() for rank in attempt.of_module(module).values()
    ]
    if any(PYTHON_REDUCER in module.options for module in modules):
        return "a compiled backward reduces gradients itself (Python reducer), where no hook sees them"
    return _why_not(attempt, Stage.APPLIED)


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

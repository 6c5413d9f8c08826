"""Computes the coverage of an attempt: once, for the verdict, the rules and all reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ddpcheck.analysis.aggregate.collector import NodesCollector
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData, has_no_replica, is_unwrapped
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.step_coverage.collector import StepCoverageCollector
from ddpcheck.analysis.step_coverage.model import Coverage, Gap, OptimizerCoverage
from ddpcheck.analysis.unwrapped.collector import UnwrappedCollector
from ddpcheck.analysis.unwrapped.judgement import (
    Basis,
    anything_agrees,
    stepped_difference,
    unwrapped_modules,
)
from ddpcheck.records.kinds.coverage import NotCompared, StepCoverageRecord
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.modules import COPIED, COPIED_IN_PARTS, ModuleRole

# Checks that need a part of ddpcheck, by its name in fault records. Without one of these the report proves less than
# its verdict would say.
MAIN_CHECKS: Mapping[str, tuple[str, ...]] = {
    "agent": ("all checks",),
    "parameters": (
        "parameters after wrapping and after each step",
        "buffers",
        "writes outside of the optimizer",
    ),
    "structure": ("parameters that are added, replaced or unfrozen after wrapping",),
    "optimizers": ("optimizer hyperparameters, scale and state",),
    "coverage": ("parameters in no DDP module",),
}
# Checks that need another part. The comparison of parameters is complete without them.
OTHER_CHECKS: Mapping[str, tuple[str, ...]] = {
    "backward": ("gradients as applied", "reduced gradients against the mean"),
    "gradients": ("gradients as applied", "reduced gradients against the mean"),
    "ignored": ("parameters that DDP ignores",),
    "across_nodes": ("replicas on other nodes, while the job runs",),
    "data": ("samples and batches",),
    "sharded": ("shards of parameters",),
    "pending_gradients": ("steps on shards without gradients",),
    "graphs": ("steps inside graphs",),
}
# Reasons in addition to `NotCompared`.
LOCAL_SGD = "local_sgd"
ONE_RANK = "one_rank"
# Parameters that need not be equal, or have no replica: a report without them is complete.
EXPECTED = frozenset({NotCompared.IGNORED.value, NotCompared.COPY.value, LOCAL_SGD, ONE_RANK})


def coverage_of(attempt: Attempt, write_errors: Collection[int] = ()) -> Coverage:
    """What the attempt trained, and what of it was compared."""
    collector = attempt.collector(StepCoverageCollector)
    steps = max(map(attempt.steps, attempt.ranks), default=0)
    compared_steps = _compared_steps(attempt)
    compared, elsewhere = _in_modules(attempt)
    missing = {rank: _missing(entries.values()) for rank, entries in collector.entries.items()}
    most = max((counts for counts in missing.values()), key=Counter.total, default=Counter())
    not_compared = {**elsewhere, **most}
    # The parameters that they stand for are counted.
    not_compared.pop(NotCompared.COPY.value, None)
    ranks, gap = _gap(attempt, missing, compared_steps, write_errors)
    lost = _lost_checks(attempt.ranks.values(), MAIN_CHECKS)
    return Coverage(
        complete=gap is Gap.NONE,
        gap=gap.value,
        trained=compared + sum(not_compared.values()),
        compared=compared,
        not_compared=not_compared,
        steps=steps,
        compared_steps=compared_steps,
        ranks=ranks,
        optimizers=_optimizers(collector.entries),
        seen=tuple(sorted({kind for record in collector.training.values() for kind in record.seen})),
        lost_checks=lost,
    )


def missing_now(attempt: Attempt) -> int:
    """Parameters that should be compared and are not, so far, on the rank with the most. Cheap, for the live view."""
    if attempt.world_size <= 1:
        return 0
    entries = attempt.collector(StepCoverageCollector).entries
    counts = [
        sum(count for reason, count in _missing(of_rank.values()).items() if reason not in EXPECTED)
        for of_rank in entries.values()
    ]
    return max(counts, default=0)


def lost_checks(probe: str) -> tuple[str, ...]:
    """Names of the checks that need `probe`."""
    return MAIN_CHECKS.get(probe) or OTHER_CHECKS.get(probe, ())


def _lost_checks(ranks: Iterable[RankData], checks: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    probes = {fault.probe for rank in ranks for fault in rank.faults}
    return tuple(name for probe, names in checks.items() if probe in probes for name in names)


def _gap(
    attempt: Attempt, missing: Mapping[int, Counter[str]], compared_steps: int, write_errors: Collection[int]
) -> tuple[tuple[int, ...], Gap]:
    """The ranks concerned and the first reason why the comparison is not complete."""
    everyone = tuple(sorted(attempt.ranks))
    if attempt.world_size <= 1 or not attempt.ranks:
        return (), Gap.NONE
    unexpected = {rank: counts for rank, counts in missing.items() if counts.keys() - EXPECTED}
    # A small model that one rank trains for itself, for example to evaluate features, has no replicas.
    private = len(unexpected) == 1 and len(attempt.ranks) > 1 and compared_steps
    if unexpected and not private:
        return tuple(sorted(unexpected)), Gap.NOT_COMPARED
    failed = tuple(
        number
        for number, rank in sorted(attempt.ranks.items())
        if any(fault.probe in MAIN_CHECKS for fault in rank.faults)
    )
    if failed:
        return failed, Gap.CHECK_LOST
    lost = {rank for rank, data in attempt.ranks.items() if data.end is not None and data.end.dropped}
    if lost or write_errors:
        return tuple(sorted({*lost, *write_errors})), Gap.RECORDS_LOST
    graph = attempt.collector(DeviceCollector).captured()
    if graph is not None and graph.replayed_steps:
        return everyone, Gap.CAPTURED
    idle = [module for module in _stepped(attempt) if not _comparisons(attempt, module)]
    if idle and not attempt.collector(NodesCollector).compared:
        return tuple(
            sorted({rank for module in idle for rank in attempt.of_module(module)})
        ), Gap.NO_STEP_COMPARED
    training = attempt.collector(StepCoverageCollector).training.values()
    backwards = sum(record.unwrapped_backwards > 0 for record in training)
    if backwards and not attempt.modules() and not missing:
        return everyone, Gap.NO_STEP_SEEN
    if _is_never_stepped(attempt):
        return everyone, Gap.NOT_STEPPED
    if _has_no_replica(attempt):
        return everyone, Gap.NO_REPLICA
    return (), Gap.NONE


def _is_never_stepped(attempt: Attempt) -> bool:
    """Whether DDP reduces gradients that nothing applies, while optimizers step parameters outside of DDP."""
    wrapped = {module for module in attempt.modules() if not is_unwrapped(module) and len(module[0]) > 1}
    stepped = {module for rank in attempt.ranks.values() for _, module in rank.optimizers}
    return (
        any(
            (stats := attempt.gradients.stats.get(module)) is not None and stats.checked for module in wrapped
        )
        and any(map(is_unwrapped, stepped))
        and not wrapped & stepped
        and not any(_comparisons(attempt, module) for module in wrapped)
    )


def _has_no_replica(attempt: Attempt) -> bool:
    """Whether several ranks train without DDP, no parameter is equal on all of them, and no finding says why."""
    stepping = [rank for rank in attempt.ranks if attempt.steps(rank)]
    if len(stepping) < 2 or len(attempt.ranks) < attempt.world_size:
        return False
    if anything_agrees(attempt):
        return False
    differences = (
        stepped_difference(attempt, module) for module in unwrapped_modules(attempt, ModuleRole.STEPPED)
    )
    return not any(each is not None and each.basis is not Basis.NONE for each in differences)


def _stepped(attempt: Attempt) -> set[ModuleKey]:
    """Modules with replicas that an optimizer steps, and whose replicas must be equal after each step."""
    entries = attempt.collector(StepCoverageCollector).entries
    stepping = {
        rank for rank, of_rank in entries.items() if any(e.compared and e.steps for e in of_rank.values())
    }
    ranks: Counter[ModuleKey] = Counter()
    for rank in stepping:
        ranks.update({module for _, module in attempt.ranks[rank].optimizers})
    return {
        module
        for module, count in ranks.items()
        if len(module[0]) > 1
        and not has_no_replica(module)
        and not attempt.uses_local_sgd(module)
        # Outside of DDP, a model that one rank trains for itself has no replicas.
        and (count > 1 or not is_unwrapped(module))
    }


def _comparisons(attempt: Attempt, module: ModuleKey) -> int:
    """After steps; also where the parameters that one rank stepped are used by others."""
    agreements = [attempt.agreement]
    if is_unwrapped(module):
        agreements.append(attempt.collector(UnwrappedCollector).agreement)
    compared = sum(
        agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).compared for agreement in agreements
    )
    received = attempt.agreement.received.get(module)
    return compared + (received[0] if received else 0)


def _compared_steps(attempt: Attempt) -> int:
    """Comparisons of the parameters after a step, over all modules whose replicas must be equal."""
    return sum(
        _comparisons(attempt, module) for module in attempt.modules() if not attempt.uses_local_sgd(module)
    )


def _in_modules(attempt: Attempt) -> tuple[int, dict[str, int]]:
    """Stepped parameters of modules, on the rank with the most: compared ones, and the others by reason."""
    most: tuple[int, dict[str, int]] = (0, {})
    entries = attempt.collector(StepCoverageCollector).entries
    # Ranks with the same optimizers and modules have the same parameters; there may be thousands.
    kinds = {frozenset(rank.optimizers): number for number, rank in reversed(attempt.ranks.items())}
    for number in kinds.values():
        rank = attempt.ranks[number]
        stepped: dict[ModuleKey, set[int]] = {}
        for (_, module), record in rank.optimizers.items():
            indices = {index for group in record.groups for index in group if index >= 0}
            description = rank.latest.get(module)
            if description is not None and description.mesh.get("kind") in (COPIED, COPIED_IN_PARTS):
                indices = set(range(len(description.parameters)))
            stepped.setdefault(module, set()).update(indices)
        compared = 0
        others: Counter[str] = Counter()
        for module, indices in stepped.items():
            if attempt.uses_local_sgd(module):
                others[LOCAL_SGD] += len(indices)
            elif len(module[0]) == 1:
                others[ONE_RANK] += len(indices)
            else:
                compared += len(indices)
        # Optimizers that step inside the backward have no record of their own.
        counted = max((entry.compared for entry in entries.get(number, {}).values()), default=0)
        compared = max(compared, counted - others.total())
        if compared + others.total() > most[0] + sum(most[1].values()):
            most = compared, dict(others)
    return most


def _missing(entries: Iterable[StepCoverageRecord]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in entries:
        if entry.steps:
            counts.update(entry.not_compared)
    return counts


def _optimizers(
    entries: Mapping[int, Mapping[int, StepCoverageRecord]],
) -> tuple[OptimizerCoverage, ...]:
    """The entries of all ranks, those of one class and line together."""
    by_line: dict[tuple[str, str, tuple[str, ...]], dict[int, StepCoverageRecord]] = {}
    for rank, of_rank in sorted(entries.items()):
        for entry in of_rank.values():
            by_line.setdefault((entry.name, entry.where, tuple(sorted(entry.not_compared))), {})[rank] = entry
    return tuple(
        OptimizerCoverage(
            name=name,
            where=where,
            ranks=tuple(by_rank),
            steps=max(entry.steps for entry in by_rank.values()),
            compared=max(entry.compared for entry in by_rank.values()),
            not_compared={
                reason: max(entry.not_compared[reason] for entry in by_rank.values()) for reason in reasons
            },
        )
        for (name, where, reasons), by_rank in by_line.items()
    )

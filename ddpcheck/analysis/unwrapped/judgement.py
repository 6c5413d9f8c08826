"""Decides from evidence whether parameters outside of DDP that differ across ranks are a fault.

A rank may train or use what it likes beside the DDP modules: a probe for its log, a critic of its own environment.
It is a fault only where the shared training depends on it, or where the job itself treats it as a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ddpcheck.analysis.aggregate.agreement import ComparisonStats, Disagreement, groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_unwrapped
from ddpcheck.analysis.collectors.manual_reduction import ManualReductionCollector
from ddpcheck.analysis.divergence.explain import same_parameter_names
from ddpcheck.analysis.evidence import differing_tensors
from ddpcheck.analysis.unwrapped.collector import UnwrappedCollector, changed_alike
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import COPIED, COPIED_IN_PARTS, ModuleRole, UseEvidence
from ddpcheck.records.reasons import UnwrappedReason

_PARAMETERS = TensorKind.PARAMETERS
# Later than any step.
_END = 1 << 62
# What ranks have in common counts if they still have it this many steps later.
_LATER = 2


class Basis(Enum):
    """Why unwrapped parameters have to be equal on all ranks; NONE: nothing shows that they have to be."""

    NONE = 0
    # A backward reaches them and a DDP module.
    SHARED_BACKWARD = 1
    # The job reduces the gradients of other parameters of the same optimizer.
    OTHERS_REDUCED = 2
    # All ranks apply the same gradients: the job reduces them.
    SAME_GRADIENTS = 3
    # The job reduces gradients, but not over all ranks, or not all ranks apply the result.
    SUBGROUPS = 4
    # Its output is an input of DDP's forward, or it reads DDP's input, or it runs inside the loss.
    USED_WITH_DDP = 5
    # It never changes in the whole job.
    CONSTANT = 6
    # The sampler of every rank draws this rank's part of one dataset, and no module is wrapped.
    SPLIT_DATA = 7
    # Optimizers step parts of one copy of it, or copies, and it was equal on all ranks after a step.
    COPIED = 8


@dataclass(frozen=True)
class UnwrappedDifference:
    """Parameters outside of DDP that differ across ranks."""

    module: ModuleKey
    first: Disagreement
    # Indices of the differing parameters at that comparison.
    differing: tuple[int, ...]
    basis: Basis
    # Whether they differed when they were first compared.
    from_start: bool


def unwrapped_modules(attempt: Attempt, role: ModuleRole) -> list[ModuleKey]:
    """Modules of this role that more than one rank has."""
    collector = attempt.collector(UnwrappedCollector)
    return [
        module
        for module in collector.first
        if len(ranks := attempt.of_module(module)) > 1
        and all(rank.latest[module].role == role.value for rank in ranks.values())
    ]


def stepped_difference(attempt: Attempt, module: ModuleKey) -> UnwrappedDifference | None:
    """None if the parameters agree, or agree again after they have differed."""
    collector = attempt.collector(UnwrappedCollector)
    params = collector.agreement.stats_of(module, Stage.PARAMS, _PARAMETERS)
    start = collector.agreement.stats_of(module, Stage.INIT_AFTER, _PARAMETERS).first
    if params.first is None or not same_parameter_names(attempt, module) or _is_recreated(attempt, module):
        return None
    if _last_equal(attempt, module) > (start or params.first).key.step:
        return None
    first = params.first
    differing = tuple(differing_tensors(attempt, first))
    basis = _basis(attempt, module, first, start is not None)
    if basis is Basis.NONE and not collector.reasons.get(module):
        # No backward reaches them: buffers of a sharded optimizer, for example.
        return None
    return UnwrappedDifference(module, first, differing, basis, start is not None)


def _basis(attempt: Attempt, module: ModuleKey, first: Disagreement, from_start: bool) -> Basis:
    collector = attempt.collector(UnwrappedCollector)
    reasons = collector.reasons.get(module, set())
    if module in collector.agreement.reduced_by_job:
        return Basis.SAME_GRADIENTS
    later = None if from_start else _later(collector, module, first)
    if later is not None and _agreeing(first, later):
        return Basis.OTHERS_REDUCED
    if _is_copied(attempt, module):
        return Basis.COPIED
    if UnwrappedReason.EXCHANGED.value in reasons:
        return Basis.NONE
    if UnwrappedReason.SHARED_BACKWARD.value in reasons:
        return Basis.SHARED_BACKWARD
    if later is not None and any(len(ranks) > 1 for _, ranks in first.groups()):
        roots = {rank: record.root for rank, record in later.items()}
        if [ranks for _, ranks in first.groups()] == [ranks for _, ranks in groups_of(roots)]:
            return Basis.SUBGROUPS
    by_hand = attempt.collector(ManualReductionCollector).stats.get(module)
    if by_hand is not None and by_hand.partly:
        return Basis.SUBGROUPS
    if attempt.data.is_split(module[0]) and not anything_agrees(attempt):
        return Basis.SPLIT_DATA
    return Basis.NONE


def _is_recreated(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether the job makes such tensors again and again: each lives for a batch of its own rank."""
    collector, ranks = attempt.collector(UnwrappedCollector), attempt.of_module(module).values()
    rows = next(iter(ranks)).latest[module].parameters
    return any(
        UseEvidence.RECREATED.value in evidence
        and any(other in rank.latest and rank.latest[other].parameters == rows for rank in ranks)
        for other, evidence in collector.uses.items()
    )


def _is_copied(attempt: Attempt, module: ModuleKey) -> bool:
    kinds = {rank.latest[module].mesh.get("kind") for rank in attempt.of_module(module).values()}
    params = attempt.collector(UnwrappedCollector).agreement.stats_of(module, Stage.PARAMS, _PARAMETERS)
    # Models that each rank trains for itself may have copies too.
    return kinds == {COPIED_IN_PARTS} or (kinds == {COPIED} and _last_agreed(params) >= 0)


def anything_agrees(attempt: Attempt) -> bool:
    """Whether a module is trained in DDP, or a parameter outside of it is equal on all ranks after a step."""
    modules = {module for rank in attempt.ranks.values() for module in rank.latest}
    return any(_agrees(attempt, module) for module in modules if len(module[0]) > 1)


def is_trained(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether DDP reduces gradients of this module or something updates it. A wrapped teacher is only evaluated."""
    if any(key == module for rank in attempt.ranks.values() for _, key in rank.optimizers):
        return True
    stats = attempt.gradients.stats.get(module)
    return (stats is not None and stats.checked > 0) or bool(
        attempt.agreement.stats_of(module, Stage.PARAMS, _PARAMETERS).compared
    )


def _agrees(attempt: Attempt, module: ModuleKey) -> bool:
    collector = attempt.collector(UnwrappedCollector)
    if not is_unwrapped(module):
        return is_trained(attempt, module)
    if attempt.is_replica(module) or attempt.uses_local_sgd(module):
        return True
    if module in collector.partly_equalised or _last_equal(attempt, module) >= 0:
        return True
    return changed_alike(collector.first.get(module, {}), collector.last.get(module, {}))


def _last_equal(attempt: Attempt, module: ModuleKey) -> int:
    """The last step after which, or before the next one, all ranks had equal parameters; -1 if there is none."""
    collector = attempt.collector(UnwrappedCollector)
    params = collector.agreement.stats_of(module, Stage.PARAMS, _PARAMETERS)
    if _is_continued(attempt, module):
        return _END
    return max(_last_agreed(params), collector.equalised.get(module, -1))


def _is_continued(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether a later optimizer steps the same parameters and found them equal, as after an average of the models."""
    ranks = attempt.of_module(module).values()
    rows = next(iter(ranks)).latest[module].parameters
    indices = {key: index for rank in ranks for index, key in rank.modules.items()}
    init = attempt.collector(UnwrappedCollector).agreement
    return any(
        index > indices.get(module, index)
        and init.stats_of(key, Stage.INIT_AFTER, _PARAMETERS).agreed
        and next(iter(attempt.of_module(key).values())).latest[key].parameters == rows
        for key, index in indices.items()
    )


def _later(
    collector: UnwrappedCollector, module: ModuleKey, first: Disagreement
) -> dict[int, DigestRecord] | None:
    """The last digests, if all ranks have them at the same step, and that is late enough.

    Ranks may take the same step by chance: the first step of Adam has the size of the learning rate, whatever the
    gradients are, so only their signs count.
    """
    last = collector.last[module]
    steps = {record.step for record in last.values()}
    if len(steps) != 1 or min(steps) < first.key.step + _LATER or last.keys() != first.digests.keys():
        return None
    return last


def _agreeing(first: Disagreement, later: dict[int, DigestRecord]) -> bool:
    """Whether other parameters have changed between the two, and are equal on all ranks both times."""
    before = {rank: record for rank, record in first.digests.items() if isinstance(record, DigestRecord)}
    return changed_alike(before, later, equal_before=True)


def used_difference(attempt: Attempt, module: ModuleKey) -> UnwrappedDifference | None:
    """None if the module agrees at the end of the job, or has agreed after it differed."""
    collector = attempt.collector(UnwrappedCollector)
    start = collector.agreement.stats_of(module, Stage.INIT_AFTER, _PARAMETERS).first
    params = collector.agreement.stats_of(module, Stage.PARAMS, _PARAMETERS)
    first = start or params.first
    last = collector.last[module]
    if first is None or not same_parameter_names(attempt, module):
        return None
    if _last_agreed(params) > first.key.step or len(groups_of({r: d.root for r, d in last.items()})) < 2:
        return None
    differing = tuple(differing_tensors(attempt, first))
    rows = next(iter(attempt.of_module(module).values())).latest[module].parameters
    # Strengths of noise and the like are scalars and vectors; weights of a network are matrices.
    is_network = any(len(rows[index][2]) > 1 for index in differing if index < len(rows))
    basis = Basis.NONE
    uses = collector.uses.get(module, set())
    if UseEvidence.COPIED.value in uses:
        # An older copy of the DDP module, which each rank renews at its own time, as to act with it. Its inputs are
        # often those that DDP reads later: only where its output reaches the training does a difference matter.
        uses = uses - {UseEvidence.COPIED.value, UseEvidence.SHARES_INPUT.value}
    if is_network and uses:
        basis = Basis.USED_WITH_DDP
    elif is_network and all(
        before.root == last[rank].root and last[rank].stage == Stage.PARAMS.value
        for rank, before in collector.first[module].items()
    ):
        basis = Basis.CONSTANT
    return UnwrappedDifference(module, first, differing, basis, start is not None)


def _last_agreed(stats: ComparisonStats) -> int:
    steps = [compared.last_before(_END) for compared in stats.agreed.values()]
    return max((step for step in steps if step is not None), default=-1)

"""Finds the first step at which parameters part and the earliest thing that explains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, odd_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.divergence.gradients import SYNCED, gradient_divergence
from ddpcheck.analysis.divergence.optimizers import held_places
from ddpcheck.analysis.evidence import differing_places, tensor_rows
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.reason_text import reason_text
from ddpcheck.formatting import name_ranks
from ddpcheck.records.reasons import WriteWindow, is_stored_as
from ddpcheck.records.schema import AppliedRecord, DigestRecord, Stage, TensorKind


def blame_for_a_step(attempt: Attempt, module: ModuleKey, root: Disagreement) -> tuple[str, tuple[int, ...]]:
    """In words, and the ranks; all of them where nothing tells who is right."""
    return _by_backwards(attempt, module, root) or _by_majority(root)


def _by_backwards(
    attempt: Attempt, module: ModuleKey, root: Disagreement
) -> tuple[str, tuple[int, ...]] | None:
    """All ranks reduce together. Who applies more reductions at once has left a step out; who applies none
    has taken one too many."""
    applied = attempt.agreement.tally(module, Stage.APPLIED, TensorKind.GRADIENTS).first
    if applied is None or (applied.moment.step, applied.moment.optimizer) != (
        root.moment.step,
        root.moment.optimizer,
    ):
        return None
    reduced = {
        r: record.synced for r, record in applied.sightings.items() if isinstance(record, AppliedRecord)
    }
    fewest = min(reduced.values())
    if fewest == max(reduced.values()):
        return None
    ranks = tuple(
        sorted(r for r, count in reduced.items() if (count == 0 if fewest == 0 else count > fewest))
    )
    return f"a step was {'added' if fewest == 0 else 'left out'} on {name_ranks(ranks)}", ranks


def _by_majority(root: Disagreement) -> tuple[str, tuple[int, ...]]:
    forwards = {rank: record.forward or 0 for rank, record in root.sightings.items()}
    groups = groups_of({rank: str(count) for rank, count in forwards.items()})
    odd = odd_ranks([ranks for _, ranks in groups])
    behind = tuple(rank for rank in odd if forwards[rank] > min(forwards.values()))
    ahead = tuple(rank for rank in odd if forwards[rank] < max(forwards.values()))
    if len(odd) < len(forwards) and behind and not ahead:
        return f"a step was left out on {name_ranks(behind)}", odd
    if len(odd) < len(forwards) and ahead and not behind:
        return f"a step was added on {name_ranks(ahead)}", odd
    return f"a step was left out on {name_ranks(behind)}, or added on {name_ranks(ahead)}", odd


# In the name of torch's optimizer that keeps on each rank the state of other parameters.
SHARDED = "ZeroRedundancy"
NO_BACKWARD = "no backward() came before it"


@dataclass(frozen=True)
class Divergence:
    """Parameters of one module part at `found`; `code` says what the evidence points at."""

    found: Disagreement
    code: str
    cause: str = ""
    # What shows the cause, where that is another moment than the parting itself.
    root: Disagreement | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    parameter: str | None = None
    # Ranks that the evidence points at; empty: those that stand apart at `found`.
    ranks: tuple[int, ...] = ()


def divergence(attempt: Attempt, module: ModuleKey) -> Divergence | None:
    """The parting of a module's parameters in training, with its cause; None where they never part."""
    found = attempt.agreement.tally(module, Stage.PARAMS, TensorKind.PARAMETERS).first
    if found is None or attempt.loose(module) or not names_agree(attempt, module):
        return None
    if attempt.agreement.tally(module, Stage.INIT_AFTER, TensorKind.PARAMETERS).first is not None:
        return None
    for explain in (
        _unknown_to_reducer,
        _scales,
        _skipped,
        _gradients,
        _rewritten,
        _by_hand,
        _frozen,
        _hyperparameters,
        _group_order,
        _state,
        _state_of_some,
    ):
        explained = explain(attempt, module, found)
        if explained is not None:
            return explained
    return Divergence(found, "DDP201")


def names_agree(attempt: Attempt, module: ModuleKey) -> bool:
    """Whether all ranks listed the same parameters in the same order when they wrapped the module."""
    lists = {tuple(row[0] for row in rank.as_wrapped[module].parameters) for rank in _ranks(attempt, module)}
    return len(lists) <= 1


def _ranks(attempt: Attempt, module: ModuleKey) -> list[Any]:
    return list(attempt.of_module(module).values())


def _unknown_to_reducer(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    changes = [
        record
        for rank in _ranks(attempt, module)
        for key, record in rank.structure
        if key == module and record.step <= found.moment.step
    ]
    rows = tensor_rows(attempt, found)
    differing = {rows[place][0] for place in differing_places(attempt, found) if place < len(rows)}
    for record in changes:
        if record.parameter in differing or not differing:
            return Divergence(
                found,
                "DDP104",
                cause=record.change,
                parameter=record.parameter,
                evidence={"change": record.change, "noticed_at_step": record.step},
            )
    return None


def _scales(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """Before the gradients: unscaling by another scale is what makes them differ."""
    explained = _hyperparameters(attempt, module, found)
    rows = explained.evidence["hyperparameters"] if explained is not None else []
    return explained if any(row["group"] is None for row in rows) else None


def _gradients(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """The gradients that were applied had parted already, and nothing had parted the parameters before."""
    parted = gradient_divergence(attempt, module)
    if parted is None or parted.found.moment.step > found.moment.step:
        return None
    rewritten = attempt.agreement.rewritten.get(module)
    if rewritten is not None and rewritten.moment.step < parted.found.moment.step:
        return None
    return Divergence(found, parted.code, cause=parted.cause)


def _rewritten(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    root = attempt.agreement.rewritten.get(module)
    if root is None or root.moment.step > found.moment.step:
        return None
    return Divergence(found, "DDP208", cause=f"written {_when(attempt, root)}, {_by_whom(root)}", root=root)


def _when(attempt: Attempt, root: Disagreement) -> str:
    module = root.moment.module
    windows = {rank.writes[module] for rank in _ranks(attempt, module) if module in rank.writes}
    window = windows.pop() if len(windows) == 1 else ""
    if window and not is_stored_as(window, WriteWindow.BEFORE_FORWARD):
        return reason_text(window)
    return "between two steps" if root.moment.step > 0 else "between wrapping and the first step"


def _by_whom(root: Disagreement) -> str:
    ranks = writers(root)
    if set(ranks) == set(root.moment.module[0]):
        return "on all ranks but not alike"
    return f"by {name_ranks(ranks)} alone"


def writers(root: Disagreement) -> tuple[int, ...]:
    """The ranks that wrote to their parameters before a step; the others stand where they stood."""
    return tuple(sorted(r for r, record in root.sightings.items() if record.stage == root.moment.stage))


def _by_hand(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """No step of a torch optimizer was seen: the job updates its parameters by itself."""
    if found.moment.optimizer >= 0:
        return None
    said = {
        r: reason_text(record.how)
        for r, record in found.sightings.items()
        if isinstance(record, DigestRecord)
    }
    stray = {rank: how for rank, how in said.items() if how not in ("", SYNCED)}
    cause = "updated outside optimizer.step()"
    if stray:
        how = stray[min(stray)]
        cause += f" from gradients that DDP did not reduce: {NO_BACKWARD if how == 'none' else how}"
    return Divergence(
        found, "DDP208", cause, evidence={"last_backward": {str(r): h for r, h in said.items()}}
    )


def _frozen(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """Parameters that no optimizer steps cannot have been parted by one."""
    places = differing_places(attempt, found)
    owned = {
        place
        for rank in _ranks(attempt, module)
        for (_, key), record in rank.optimizers.items()
        if key == module
        for group in record.groups
        for place in group
    }
    if not owned or not places or any(place in owned for place in places):
        return None
    return Divergence(found, "DDP208", cause="no optimizer steps these parameters")


def _hyperparameters(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    root = attempt.agreement.hyper.get(module)
    if root is None or root.moment.step > found.moment.step:
        return None
    rows = hyper_rows(attempt, root)
    names = sorted({row["name"] for row in rows})
    return Divergence(
        found,
        "DDP206",
        cause="hyperparameters differ: " + ", ".join(names),
        root=root,
        evidence={"hyperparameters": rows},
    )


def hyper_rows(attempt: Attempt, root: Disagreement) -> list[dict[str, Any]]:
    """Each hyperparameter that is not the same on all ranks, with its values."""
    moment = root.moment
    values = {rank: attempt.ranks[rank].hyper_at(moment.optimizer, moment.step) for rank in root.sightings}
    rows = []
    for name in sorted({name for said in values.values() for name in said}):
        by_rank = {str(rank): said.get(name) for rank, said in values.items()}
        if len({repr(value) for value in by_rank.values()}) > 1:
            group, _, short = name.partition(".")
            scaler = not group.isdigit()
            rows.append(
                {
                    "optimizer": moment.optimizer,
                    "group": None if scaler else int(group),
                    "name": name if scaler else short,
                    "by_rank": by_rank,
                }
            )
    return rows


def _group_order(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """The same parameters handed to the optimizer in another order or other groups."""
    said = {
        number: repr(record.groups)
        for number, rank in attempt.of_module(module).items()
        for (optimizer, key), record in rank.optimizers.items()
        if key == module and optimizer == found.moment.optimizer
    }
    groups = groups_of(said)
    if len(groups) < 2:
        return None
    evidence = {"parameter_order": [{"ranks": list(ranks), "groups": text} for text, ranks in groups]}
    held = held_places(attempt, module, found.moment.optimizer)
    everything = frozenset().union(*held.values())
    lacking = {rank: everything - places for rank, places in held.items() if places < everything}
    if not lacking:
        return Divergence(found, "DDP206", "parameters in another order or other groups", evidence=evidence)
    rank = min(lacking)
    alike = [other for other, places in lacking.items() if places == lacking[rank]]
    rows = tensor_rows(attempt, found)
    names = [str(rows[place][0]) for place in sorted(lacking[rank]) if place < len(rows)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    cause = f"the optimizer does not hold {', '.join(names[:3])}{more} on {name_ranks(alike)}, where others step them"
    return Divergence(found, "DDP206", cause, evidence=evidence)


def _state(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    root = attempt.agreement.tally(module, Stage.STATE, TensorKind.STATE).first
    if root is None or root.moment.step > found.moment.step:
        return None
    return Divergence(found, "DDP206", cause="optimizer state differs before the step", root=root)


def _state_of_some(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """Some ranks came to the step with a state, or a newly loaded one, and the others did not."""
    moments = [
        one.moment
        for one in attempt.agreement.partial_state
        if one.moment.module == module and one.moment.step <= found.moment.step
    ]
    for root in attempt.agreement.partial_state:
        # Where others hold other parts, the state is sharded.
        alone = [(m.optimizer, m.step) for m in moments].count((root.moment.optimizer, root.moment.step)) == 1
        silent = set(module[0]) - set(root.sightings)
        if root.moment not in moments or not alone or silent & attempt.agreement.impaired:
            continue
        if _sharded(attempt, module, root.moment.optimizer):
            continue
        ranks = tuple(sorted(root.sightings))
        cause = f"optimizer state was loaded on {name_ranks(ranks)} alone"
        return Divergence(found, "DDP206", cause, root, {"state_loaded_on_ranks": list(ranks)})
    return None


def _sharded(attempt: Attempt, module: ModuleKey, optimizer: int) -> bool:
    records = [rank.optimizers.get((optimizer, module)) for rank in _ranks(attempt, module)]
    return any(record is not None and SHARDED in record.name for record in records)


def _skipped(attempt: Attempt, module: ModuleKey, found: Disagreement) -> Divergence | None:
    """The same step of the optimizer came after another number of forwards: somebody left one out."""
    root = attempt.agreement.forwards.get(module)
    # A step that was left out parts the parameters at once; an older difference has other reasons.
    if root is None or root.moment.step != found.moment.step or attempt.joined(module):
        return None
    forwards = {str(rank): record.forward for rank, record in root.sightings.items()}
    cause, ranks = blame_for_a_step(attempt, module, root)
    return Divergence(
        found, "DDP207", cause=cause, root=root, evidence={"forwards_before_step": forwards}, ranks=ranks
    )

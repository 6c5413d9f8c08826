"""The likely mistake behind a hang, from the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.hang.collectives import ConflictKind
from ddpcheck.analysis.hang.stacks import RankStack, collective_conflict
from ddpcheck.formatting import name_ranks

_SAME_MODEL = (
    "Build the same model on every rank, and let DDP ignore the same parameters on every rank: the reducers "
    "of all ranks reduce the same buckets in the same order."
)


@dataclass(frozen=True)
class Mistake:
    """The likely mistake: the ranks at fault, the cause and the fix."""

    ranks: tuple[int, ...]
    cause: str
    fix: str


def likely_mistake(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake:
    """The first explanation that fits the evidence, from the most certain to the most general."""
    for explain in (
        _evaluation,
        _different_models,
        _early_stop,
        _blocked,
        _different_steps,
        _different_collectives,
    ):
        mistake = explain(stacks, attempt)
        if mistake is not None:
            return mistake
    return _different_calls(stacks)


def _evaluation(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    inside = [stack for stack in stacks if stack.evaluates]
    others = [stack for stack in stacks if not stack.evaluates]
    if not inside or not others:
        return None
    ranks = _ranks(inside)
    return Mistake(
        ranks,
        f"evaluation through the wrapper on {name_ranks(ranks)} only: a forward without gradients still "
        f"broadcasts the buffers, and {name_ranks(_ranks(others))} do{_es(others)} not take part",
        "Evaluate with `model.module` if only some ranks evaluate, or let all ranks evaluate. "
        "`forward_sync_buffers=False` (`broadcast_buffers=False` before torch 2.13) also avoids the "
        "broadcast.",
    )


def _early_stop(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    training = [stack for stack in stacks if stack.in_training]
    outside = [stack for stack in stacks if stack.outside]
    ended = [stack for stack in stacks if stack.has_left]
    if not outside or not (training or ended) or len(training) + len(outside) < len(stacks):
        return None
    # If no rank trains any more, those that ended stopped too early; else all that are outside.
    early = outside if training else ended
    waiting = training or [stack for stack in outside if not stack.has_left]
    # A rank that is ahead of the waiting ranks did not stop early.
    if not waiting or max(stack.step for stack in early) > min(stack.step for stack in waiting):
        return None
    ranks, last = _ranks(early), max(stack.step for stack in early) - 1
    left = f"left the training loop after step {last}" if last >= 0 else "left before the first step"
    return Mistake(
        ranks,
        f"early stop on some ranks: {name_ranks(ranks)} {left} while {name_ranks(_ranks(waiting))} "
        f"continue{_s(waiting)}",
        "Let all ranks decide together when to stop (reduce the flag, or broadcast rank 0's decision), and "
        "give every rank the same number of batches, or train inside DDP's join().",
    )


def _different_models(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    for module in attempt.modules():
        models = {
            rank: repr(
                (data.as_wrapped[module].ignored, [row[:3] for row in data.as_wrapped[module].parameters])
            )
            for rank, data in attempt.of_module(module).items()
        }
        groups = groups_of(models)
        if len(groups) > 1:
            outliers = outlier_ranks([ranks for _, ranks in groups])
            return Mistake(outliers, _describe_models(attempt, module, outliers), _SAME_MODEL)
    return None


def _describe_models(attempt: Attempt, module: ModuleKey, outliers: tuple[int, ...]) -> str:
    ignored = {rank: set(data.as_wrapped[module].ignored) for rank, data in attempt.of_module(module).items()}
    everywhere = set.intersection(*ignored.values())
    differing = {name for names in ignored.values() for name in names - everywhere}
    if not differing:
        return f"ranks have different parameters: {name_ranks(outliers)}"
    name = min(differing)
    ranks = tuple(rank for rank, names in ignored.items() if name in names)
    return (
        f"ranks have different ignored parameters: for example, {name} is ignored on {name_ranks(ranks)} only"
    )


def _blocked(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    blocked = [stack for stack in stacks if stack.wait is None and not stack.has_left]
    if not blocked or len(blocked) == len(stacks):
        return None
    ranks, location = _ranks(blocked), blocked[0].location
    return Mistake(
        ranks,
        f"{name_ranks(ranks)} never reach{_es(blocked)} the collective that the others wait in: blocked outside "
        "communication" + (f", at {location}" if location else ""),
        "Read that rank's stack: it waits for a lock that is not released, a thread or a queue.",
    )


def _different_steps(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    steps = groups_of({stack.rank: str(stack.step) for stack in stacks})
    if len(steps) < 2:
        return None
    text = "; ".join(f"{name_ranks(ranks)}: {step}" for step, ranks in steps)
    return Mistake(
        outlier_ranks([ranks for _, ranks in steps]),
        f"ranks are at different steps ({text}): some skipped a step, or took an extra one",
        "Let all ranks decide together whether to step, and give every rank the same number of batches.",
    )


def _different_collectives(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    """By the numbers of collectives alone, where stacks and steps explain nothing."""
    conflict = collective_conflict(stacks)
    if conflict is None:
        return None
    known = any(conflict.calls.values())
    elsewhere = len({stack.location for stack in stacks}) > 1
    # The lines at which ranks wait say more than numbers. A rank that spins does not wait at a line.
    if elsewhere and (not known or all(stack.wait is not None for stack in stacks)):
        return None
    if not known and conflict.kind is not ConflictKind.MISSING:
        return None
    return Mistake(conflict.ranks, conflict.cause, conflict.fix)


def _different_calls(stacks: Sequence[RankStack]) -> Mistake:
    calls = groups_of(
        {each.rank: f"{each.wait.name if each.wait else ''} {each.location}" for each in stacks}
    )
    if len(calls) > 1:
        return Mistake(
            outlier_ranks([ranks for _, ranks in calls]),
            "a collective that only some ranks reach: ranks wait in different ones",
            "Call every collective on all ranks of its group, in the same order: do not put it under conditions "
            "that depend on the rank or on its data.",
        )
    issued = groups_of({each.rank: str(each.collectives) for each in stacks})
    counts = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in issued)
    differ = len(issued) > 1
    return Mistake(
        outlier_ranks([ranks for _, ranks in issued]) if differ else _ranks(stacks),
        "all ranks wait at the same line"
        + (f", after different numbers of collectives ({counts})" if differ else ""),
        "Look for a collective before this one that some rank called an extra time, or with another group or size.",
    )


def _ranks(stacks: Sequence[RankStack]) -> tuple[int, ...]:
    return tuple(stack.rank for stack in stacks)


def _s(stacks: Sequence[RankStack]) -> str:
    return "" if len(stacks) > 1 else "s"


def _es(stacks: Sequence[RankStack]) -> str:
    return "" if len(stacks) > 1 else "es"

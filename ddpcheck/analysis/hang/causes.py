"""The likely mistake behind a hang, from the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.divergence.explain import reason_text
from ddpcheck.analysis.hang.collectives import ConflictKind
from ddpcheck.analysis.hang.stacks import LOADER, LOCKED, Loop, RankStack, WaitKind, collective_conflict
from ddpcheck.formatting import name_ranks

_SAME_MODEL = (
    "Build the same model on every rank, and let DDP ignore the same parameters on every rank: the reducers "
    "of all ranks reduce the same buckets in the same order."
)
_MOST_WORKERS = 4


@dataclass(frozen=True)
class Mistake:
    """The likely mistake: the ranks at fault, the cause and the fix."""

    ranks: tuple[int, ...]
    cause: str
    fix: str
    # The step at which it happened, where that is known better than from the stacks.
    step: int | None = None


def likely_mistake(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake:
    """The first explanation that fits the evidence, from the most certain to the most general."""
    for explain in (
        _file_lock,
        _loader_worker,
        _blocked,
        _not_arrived,
        _wrapped_alone,
        _evaluation,
        _different_models,
        _not_reduced,
        _early_stop,
        _different_steps,
        _called_alone,
        _different_collectives,
    ):
        mistake = explain(stacks, attempt)
        if mistake is not None:
            return mistake
    return _different_calls(stacks)


def wrapped_by_some(attempt: Attempt) -> tuple[int, ...]:
    """The ranks that called DDP's constructor, if others trained or ended without; else none."""
    wrapped = tuple(sorted(rank for rank, data in attempt.ranks.items() if data.wraps))
    return wrapped if len(wrapped) < len(attempt.ranks) else ()


def not_reduced_by_some(attempt: Attempt) -> Mistake | None:
    """Ranks that stepped with gradients which DDP had not reduced, while the others wait for their part."""
    for module in attempt.modules():
        ranks = attempt.of_module(module)
        first = {
            rank: data.first_unreduced[module]
            for rank, data in ranks.items()
            if module in data.first_unreduced
        }
        if not first or len(first) == len(ranks):
            continue
        step = min(record.step for record in first.values())
        steps = {rank: attempt.steps(rank) for rank in ranks if rank not in first}
        # The others have not come past that step: its reduction never finished.
        if max(steps.values()) > step:
            continue
        record = first[min(first)]
        reason = reason_text(record.reason) or "no backward through DDP"
        return Mistake(
            tuple(sorted(first)),
            f"{name_ranks(tuple(sorted(first)))} stepped with gradients that DDP did not reduce, from step {step} on "
            f"({reason}): the others wait for {'their' if len(first) > 1 else 'its'} part of the AllReduce",
            "Run every forward and backward of a training step through the DDP wrapper, and under no_sync() on all "
            "ranks or on none.",
            step,
        )
    return None


def _not_reduced(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    mistake = not_reduced_by_some(attempt)
    waiting = {stack.rank for stack in stacks if stack.in_training}
    return mistake if mistake is not None and waiting and not waiting & set(mistake.ranks) else None


WRAP_EVERYWHERE = (
    "Construct DDP on every rank of its process group, in the same order: its constructor communicates. Keep "
    "conditions on the rank out of the code that builds the model."
)


def _wrapped_alone(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    """Some ranks wait in DDP's constructor, and the others have not called it."""
    wrapping = [stack for stack in stacks if stack.wait is not None and stack.wait.kind is WaitKind.WRAPPING]
    others = [stack for stack in stacks if stack not in wrapping]
    wrapped = wrapped_by_some(attempt)
    if not wrapping or not others or set(wrapped) != set(_ranks(wrapping)):
        return None
    return Mistake(
        _ranks(wrapping),
        f"DDP is constructed on {name_ranks(_ranks(wrapping))} only: {name_ranks(_ranks(others))} did not call its "
        "constructor",
        WRAP_EVERYWHERE,
    )


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
    in_loop = [_is_in_loop_of(stack, training, attempt) for stack in early if not stack.has_left]
    if True in in_loop:
        # A rank in the loop of the others calls a collective of its own there. Only those that ended stopped.
        early, in_loop = ended, []
    waiting = [stack for stack in stacks if stack not in early and (stack in training or not stack.has_left)]
    # A rank that is ahead of the waiting ranks did not stop early.
    if not early or not waiting or max(stack.step for stack in early) > min(stack.step for stack in waiting):
        return None
    ranks, last = _ranks(early), max(stack.step for stack in early) - 1
    when = f"after step {last}" if last >= 0 else "before the first step"
    others = f"while {name_ranks(_ranks(waiting))} {'continue' if training else 'still wait'}{_s(waiting)}"
    if None in in_loop:
        cause = (
            f"early stop on some ranks, or a collective that only they call: {name_ranks(ranks)} "
            f"{_are(early)} outside of a training step {when} {others}"
        )
    elif all(stack.has_left for stack in early):
        cause = f"early stop on some ranks: {name_ranks(ranks)} ended {when} {others}"
    else:
        cause = f"early stop on some ranks: {name_ranks(ranks)} left the training loop {when} {others}"
    return Mistake(
        ranks,
        cause,
        "Let all ranks decide together when to stop (reduce the flag, or broadcast rank 0's decision), and "
        "give every rank the same number of batches, or train inside DDP's join().",
    )


def _is_in_loop_of(stack: RankStack, training: Sequence[RankStack], attempt: Attempt) -> bool | None:
    """Whether a rank is still in the loop in which the others train; None: not known."""
    loops = {_training_loop(other, attempt) for other in training}
    if None in loops or not loops:
        return None
    if stack.loops is None and not stack.frames:
        return None
    return any(loop in (stack.loops or ()) for loop in loops)


def _training_loop(stack: RankStack, attempt: Attempt) -> Loop | None:
    """The innermost loop with the optimizer's step; where that is not known, the innermost one."""
    steps = {
        tuple(record.where.rpartition(":")[::2])
        for rank in attempt.ranks.values()
        for record in rank.optimizers.values()
    }
    loops = stack.loops or ()
    for loop in loops:
        file, _, first, last = loop
        if any(file == at and line.isdigit() and first <= int(line) <= last for at, line in steps):
            return loop
    return loops[0] if loops else None


def _file_lock(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    """Ranks wait for a file lock that a rank holds which waits for them."""
    locked = [stack for stack in stacks if stack.state == LOCKED and stack.lock is not None]
    if not locked:
        return None
    by_rank = {stack.rank: stack for stack in stacks}
    holders = tuple(sorted({stack.lock[0] for stack in locked if stack.lock and stack.lock[0] is not None}))
    if not holders:
        return None
    holder = by_rank[holders[0]]
    files = sorted({stack.lock[1] for stack in locked if stack.lock and stack.lock[1]})
    what = f"the lock of {', '.join(files)}" if files else "a file lock"
    return Mistake(
        holders,
        f"{name_ranks(_ranks(locked))} wait{_s(locked)} for {what}, which {name_ranks(holders)} "
        f"hold{'s' if len(holders) == 1 else ''}: {name_ranks(holders[:1])} {holder.describe()}",
        "Release the lock before the collective: no rank may call one while it holds a lock that others need to get "
        "there.",
    )


def _loader_worker(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    waiting = [stack for stack in stacks if stack.state == LOADER]
    if not waiting:
        return None
    workers = "; ".join(
        f"process {', '.join(map(str, stack.workers))} of rank {stack.rank}"
        for stack in waiting[:_MOST_WORKERS]
    )
    return Mistake(
        _ranks(waiting),
        f"{name_ranks(_ranks(waiting))} wait{_s(waiting)} for a data-loader worker that never answers ({workers}): all "
        "threads of the worker wait for a lock",
        "A worker that is forked while another thread holds a lock never gets it: create threads, loggers and clients "
        "inside the workers, or use multiprocessing_context='spawn'. DataLoader(timeout=...) turns this into an error.",
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
    blocked = [stack for stack in stacks if stack.wait is None and not stack.has_left and not stack.may_go_on]
    if not blocked or len(blocked) == len(stacks):
        return None
    ranks, location = _ranks(blocked), blocked[0].location
    return Mistake(
        ranks,
        f"{name_ranks(ranks)} never reach{_es(blocked)} the collective that the others wait in: blocked outside "
        "communication" + (f", at {location}" if location else ""),
        "Read that rank's stack: it waits for a lock that is not released, a thread or a queue.",
    )


def _not_arrived(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    """Of a job that was not stopped: ranks that might have gone on, and did not before the others gave up."""
    late = [stack for stack in stacks if stack.may_go_on]
    if not late or len(late) == len(stacks):
        return None
    ranks, location = _ranks(late), late[0].location
    if late[0].workers:
        does = f"waits for a data-loader worker (process {', '.join(map(str, late[0].workers))})"
    else:
        does = late[0].activity
    if late[0].lock is not None:
        does = f"waits for the lock of {late[0].lock[1] or 'a file'}"
    return Mistake(
        ranks,
        f"{name_ranks(ranks)} did not reach the collective that the others waited in"
        + (f": at {location}, {name_ranks(ranks[:1])} {does}" if location else ""),
        "Read that rank's stack. Do not let one rank wait in a loop for something that another rank does after the "
        "collective. If it is only slow, let all ranks wait for it: raise the timeout of init_process_group().",
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


def _called_alone(stacks: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    """Some ranks wait in a collective that the program calls, all others in DDP's own communication."""
    callers = [stack for stack in stacks if stack.wait is not None and stack.wait.kind is WaitKind.COLLECTIVE]
    others = [stack for stack in stacks if stack.in_training]
    if not callers or not others or len(callers) + len(others) < len(stacks):
        return None
    ranks = outlier_ranks([_ranks(callers), _ranks(others)])
    names = sorted({stack.wait.name for stack in callers if stack.wait is not None})
    at = f" at {callers[0].location}" if callers[0].location else ""
    return Mistake(
        ranks if len(ranks) < len(stacks) else _ranks(callers),
        f"a collective that only some ranks reach: {name_ranks(_ranks(callers))} call{_s(callers)} {', '.join(names)}"
        f"{at}, {name_ranks(_ranks(others))} do{_es(others)} not and wait{_s(others)} in DDP's own communication",
        "Call every collective on all ranks of its group, in the same order: do not put it under conditions that "
        "depend on the rank or on its data.",
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


def _are(stacks: Sequence[RankStack]) -> str:
    return "are" if len(stacks) > 1 else "is"


def _es(stacks: Sequence[RankStack]) -> str:
    return "" if len(stacks) > 1 else "es"

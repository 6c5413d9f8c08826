"""What the standings of a job that hangs say of the mistake behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hang.snapshot import RankStack
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks

_SAME_MODEL = (
    "Build the same model on every rank, and let DDP ignore the same parameters on every rank: its reducers "
    "reduce buckets of parameters in a fixed order, and wait for each other's."
)


@dataclass(frozen=True)
class Mistake:
    """The likely mistake: who is odd, why, and what to do."""

    ranks: tuple[int, ...]
    cause: str
    fix: str


def mistake_of(stands: Sequence[RankStack], attempt: Attempt) -> Mistake:
    """The first reading that the evidence allows, from the surest to the most general."""
    for reading in (_evaluation, _different_models, _early_stop, _standing_still, _different_steps):
        mistake = reading(stands, attempt)
        if mistake is not None:
            return mistake
    return _different_calls(stands)


def _evaluation(stands: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    inside = [stand for stand in stands if stand.evaluates]
    others = [stand for stand in stands if not stand.evaluates]
    if not inside or not others:
        return None
    ranks = _ranks(inside)
    return Mistake(
        ranks,
        f"evaluation through the wrapper on {name_ranks(ranks)} only: a forward without gradients still "
        f"broadcasts the buffers, and {name_ranks(_ranks(others))} take{_s(others)} no part in it",
        "Evaluate with `model.module` where only some ranks do it, or let all ranks evaluate; "
        "`forward_sync_buffers=False` (`broadcast_buffers=False` before torch 2.13) also does without the "
        "broadcast.",
    )


def _early_stop(stands: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    training = [stand for stand in stands if stand.in_training]
    outside = [stand for stand in stands if stand.outside]
    gone = [stand for stand in stands if stand.has_left]
    if not outside or not (training or gone) or len(training) + len(outside) < len(stands):
        return None
    # Where nobody trains any more, those that are gone left too early; else all that are outside.
    early = outside if training else gone
    waiting = training or [stand for stand in outside if not stand.has_left]
    # One that is ahead of those who wait has left nothing out.
    if not waiting or max(stand.step for stand in early) > min(stand.step for stand in waiting):
        return None
    ranks, last = _ranks(early), max(stand.step for stand in early) - 1
    left = f"left the training loop after step {last}" if last >= 0 else "left before the first step"
    return Mistake(
        ranks,
        f"early stop on some ranks: {name_ranks(ranks)} {left} while {name_ranks(_ranks(waiting))} "
        f"{'go' if len(waiting) > 1 else 'goes'} on",
        "Let all ranks decide together when to stop (reduce the flag, or broadcast rank 0's decision), and "
        "give every rank the same number of batches, or train inside DDP's join().",
    )


def _different_models(stands: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    for module in attempt.modules():
        said = {
            rank: repr(
                (data.as_wrapped[module].ignored, [row[:3] for row in data.as_wrapped[module].parameters])
            )
            for rank, data in attempt.of_module(module).items()
        }
        groups = groups_of(said)
        if len(groups) > 1:
            odd = outlier_ranks([ranks for _, ranks in groups])
            return Mistake(odd, _told_models(attempt, module, odd), _SAME_MODEL)
    return None


def _told_models(attempt: Attempt, module: ModuleKey, odd: tuple[int, ...]) -> str:
    ignored = {rank: set(data.as_wrapped[module].ignored) for rank, data in attempt.of_module(module).items()}
    everywhere = set.intersection(*ignored.values())
    differing = {name for names in ignored.values() for name in names - everywhere}
    if not differing:
        return f"ranks have different parameters: {name_ranks(odd)}"
    name = min(differing)
    who = tuple(rank for rank, names in ignored.items() if name in names)
    return f"ranks have different ignored parameters: {name}, for one, is ignored on {name_ranks(who)} only"


def _standing_still(stands: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    still = [stand for stand in stands if stand.wait is None and not stand.has_left]
    if not still or len(still) == len(stands):
        return None
    ranks, place = _ranks(still), still[0].place
    return Mistake(
        ranks,
        f"{name_ranks(ranks)} never get{_s(still)} to where the others wait: blocked outside communication"
        + (f", at {place}" if place else ""),
        "Look at that rank's stack: a lock that nobody gives back, a thread or a queue it waits for.",
    )


def _different_steps(stands: Sequence[RankStack], attempt: Attempt) -> Mistake | None:
    steps = groups_of({stand.rank: str(stand.step) for stand in stands})
    if len(steps) < 2:
        return None
    told = "; ".join(f"{name_ranks(ranks)}: {step}" for step, ranks in steps)
    return Mistake(
        outlier_ranks([ranks for _, ranks in steps]),
        f"ranks are at different steps ({told}): some skipped a step, or took one more",
        "Let all ranks decide together whether to step, and give every rank the same number of batches.",
    )


def _different_calls(stands: Sequence[RankStack]) -> Mistake:
    calls = groups_of({s.rank: f"{s.wait.name if s.wait else ''} {s.place}" for s in stands})
    if len(calls) > 1:
        return Mistake(
            outlier_ranks([ranks for _, ranks in calls]),
            "a collective that only some ranks reach: ranks wait in different ones",
            "Call every collective on all ranks of its group, in the same order: take it out of conditions "
            "that depend on the rank or on its data.",
        )
    issued = groups_of({s.rank: str(s.collectives) for s in stands})
    told = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in issued)
    differ = len(issued) > 1
    return Mistake(
        outlier_ranks([ranks for _, ranks in issued]) if differ else _ranks(stands),
        "all ranks wait at the same place"
        + (f", with different numbers of collectives behind them ({told})" if differ else ""),
        "Look for a collective that some rank called once more, or with another group or size, before this one.",
    )


def _ranks(stands: Sequence[RankStack]) -> tuple[int, ...]:
    return tuple(stand.rank for stand in stands)


def _s(stands: Sequence[RankStack]) -> str:
    return "" if len(stands) > 1 else "s"

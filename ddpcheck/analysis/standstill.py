"""The ranks of a job that hangs: where each one stands, and what that says of the mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.agreement import ModuleKey, groups_of, odd_ranks
from ddpcheck.analysis.attempt import Attempt
from ddpcheck.analysis.case import name_ranks
from ddpcheck.analysis.run import Hang
from ddpcheck.analysis.stacks import Frame, Kind, Wait, place_of, wait_of
from ddpcheck.records.schema import StandingRecord

LEFT = "left"
# The last moment of a rank that is in a training forward, and of one that is between two steps.
_IN_FORWARD = "forward"
_BETWEEN_STEPS = ("after_step", "wrapped", "")


@dataclass(frozen=True)
class Stand:
    """One rank of a job that hangs."""

    rank: int
    state: str
    step: int
    moment: str
    wait: Wait | None
    frames: Sequence[Frame]
    collectives: int | None

    @property
    def has_left(self) -> bool:
        return self.state == LEFT

    @property
    def in_training(self) -> bool:
        """DDP communicates here, in a forward or backward that trains."""
        return self.wait is not None and self.wait.kind.of_training and not self.evaluates

    @property
    def evaluates(self) -> bool:
        """In DDP's forward, but none that trains: those are announced."""
        kinds = (Kind.BUFFERS, Kind.FORWARD)
        return self.wait is not None and self.wait.kind in kinds and self.moment != _IN_FORWARD

    @property
    def outside(self) -> bool:
        """Between two steps, and not in the hands of DDP."""
        if self.has_left:
            return True
        ddp = self.wait is not None and self.wait.kind is not Kind.COLLECTIVE
        return not ddp and self.moment in _BETWEEN_STEPS

    @property
    def place(self) -> str:
        frame = place_of(self.frames)
        return "" if frame is None else f"{frame[0]}:{frame[1]}"

    def told(self, several: bool = False) -> str:
        """What it does, in words that fit behind "rank 0", or behind "ranks 0-2"."""
        s = "" if several else "s"
        at = f" ({self.place})" if self.place else ""
        if self.has_left:
            return f"{'have' if several else 'has'} left after {_steps(self.step)}"
        if not self.frames:
            return f"stand{s} still in native code that lets nobody look inside, in step {self.step}"
        if self.wait is None:
            return f"stand{s} still outside communication in step {self.step}{at}"
        what = f"{self.wait.name} without gradients" if self.evaluates else self.wait.name
        when = f"after {_steps(self.step)}" if self.moment in _BETWEEN_STEPS else f"in step {self.step}"
        return f"wait{s} in {what} {when}{at}"


@dataclass(frozen=True)
class Mistake:
    """The likely mistake: who is odd, why, and what to do."""

    ranks: tuple[int, ...]
    cause: str
    fix: str


def stands_of(attempt: Attempt, hang: Hang) -> list[Stand]:
    return [
        _stand(
            rank,
            hang.states.get(rank, ""),
            None if rank in hang.silent else data.standing,
            attempt.steps(rank),
        )
        for rank, data in sorted(attempt.ranks.items())
    ]


def _stand(rank: int, state: str, said: StandingRecord | None, steps: int) -> Stand:
    if said is None:
        return Stand(rank, state, steps, "", None, (), None)
    frames = [frame for frame in said.frames if len(frame) == 3]
    wait = None if state == LEFT else wait_of(frames)
    issued = sum(said.collectives.values()) if said.collectives else None
    # A rank that left in between knows no more than its records.
    step = max(said.step, steps) if state == LEFT else said.step
    return Stand(rank, state, step, said.moment, wait, frames, issued)


def alike(stands: Sequence[Stand]) -> list[list[Stand]]:
    """Ranks that stand at the same place and step, the most numerous first."""
    groups = groups_of({stand.rank: repr((stand.told(), stand.frames)) for stand in stands})
    by_rank = {stand.rank: stand for stand in stands}
    return [[by_rank[rank] for rank in ranks] for _, ranks in groups]


def evidence_of(groups: Sequence[Sequence[Stand]]) -> list[dict[str, Any]]:
    """For report.json: one entry for ranks that stand alike."""
    return [
        {
            "ranks": [stand.rank for stand in group],
            "step": group[0].step,
            "after": group[0].moment,
            "waits_in": group[0].wait.name if group[0].wait is not None else None,
            "left": group[0].has_left,
            "collectives": {str(s.rank): s.collectives for s in group if s.collectives is not None},
            "stack": [f"{file}:{line} in {function}" for file, line, function in group[0].frames],
        }
        for group in groups
    ]


def mistake_of(stands: Sequence[Stand], attempt: Attempt) -> Mistake:
    """The first reading that the evidence allows, from the surest to the most general."""
    for reading in (_evaluation, _different_models, _early_stop, _standing_still, _different_steps):
        mistake = reading(stands, attempt)
        if mistake is not None:
            return mistake
    return _different_calls(stands)


def _evaluation(stands: Sequence[Stand], attempt: Attempt) -> Mistake | None:
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


def _early_stop(stands: Sequence[Stand], attempt: Attempt) -> Mistake | None:
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


def _different_models(stands: Sequence[Stand], attempt: Attempt) -> Mistake | None:
    for module in attempt.modules():
        said = {
            rank: repr(
                (data.as_wrapped[module].ignored, [row[:3] for row in data.as_wrapped[module].parameters])
            )
            for rank, data in attempt.of_module(module).items()
        }
        groups = groups_of(said)
        if len(groups) > 1:
            odd = odd_ranks([ranks for _, ranks in groups])
            return Mistake(odd, _told_models(attempt, module, odd), _SAME_MODEL)
    return None


_SAME_MODEL = (
    "Build the same model on every rank, and let DDP ignore the same parameters on every rank: its reducers "
    "reduce buckets of parameters in a fixed order, and wait for each other's."
)


def _told_models(attempt: Attempt, module: ModuleKey, odd: tuple[int, ...]) -> str:
    ignored = {rank: set(data.as_wrapped[module].ignored) for rank, data in attempt.of_module(module).items()}
    everywhere = set.intersection(*ignored.values())
    differing = {name for names in ignored.values() for name in names - everywhere}
    if not differing:
        return f"ranks have different parameters: {name_ranks(odd)}"
    name = min(differing)
    who = tuple(rank for rank, names in ignored.items() if name in names)
    return f"ranks have different ignored parameters: {name}, for one, is ignored on {name_ranks(who)} only"


def _standing_still(stands: Sequence[Stand], attempt: Attempt) -> Mistake | None:
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


def _different_steps(stands: Sequence[Stand], attempt: Attempt) -> Mistake | None:
    steps = groups_of({stand.rank: str(stand.step) for stand in stands})
    if len(steps) < 2:
        return None
    told = "; ".join(f"{name_ranks(ranks)}: {step}" for step, ranks in steps)
    return Mistake(
        odd_ranks([ranks for _, ranks in steps]),
        f"ranks are at different steps ({told}): some skipped a step, or took one more",
        "Let all ranks decide together whether to step, and give every rank the same number of batches.",
    )


def _different_calls(stands: Sequence[Stand]) -> Mistake:
    calls = groups_of({s.rank: f"{s.wait.name if s.wait else ''} {s.place}" for s in stands})
    if len(calls) > 1:
        return Mistake(
            odd_ranks([ranks for _, ranks in calls]),
            "a collective that only some ranks reach: ranks wait in different ones",
            "Call every collective on all ranks of its group, in the same order: take it out of conditions "
            "that depend on the rank or on its data.",
        )
    issued = groups_of({s.rank: str(s.collectives) for s in stands})
    told = "; ".join(f"{name_ranks(ranks)}: {count}" for count, ranks in issued)
    return Mistake(
        odd_ranks([ranks for _, ranks in issued]) if len(issued) > 1 else _ranks(stands),
        "all ranks wait at the same place"
        + (
            f", but came there with different numbers of collectives behind them ({told})"
            if len(issued) > 1
            else ""
        ),
        "Look for a collective that some rank called once more, or with another group or size, before this one.",
    )


def _ranks(stands: Sequence[Stand]) -> tuple[int, ...]:
    return tuple(stand.rank for stand in stands)


def _s(stands: Sequence[Stand]) -> str:
    return "" if len(stands) > 1 else "s"


def _steps(count: int) -> str:
    return f"step {count - 1}" if count else "no step"

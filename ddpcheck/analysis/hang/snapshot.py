"""The ranks of a job that hangs: where each one stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hang.stacks import Frame, Wait, WaitKind, place_of, wait_of
from ddpcheck.analysis.run_reader import Hang
from ddpcheck.records.kinds.hang import StackRecord

LEFT = "left"
# The last moment of a rank that is in a training forward, and of one that is between two steps.
_IN_FORWARD = "forward"
_BETWEEN_STEPS = ("after_step", "wrapped", "")


@dataclass(frozen=True)
class RankStack:
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
        kinds = (WaitKind.BUFFERS, WaitKind.FORWARD)
        return self.wait is not None and self.wait.kind in kinds and self.moment != _IN_FORWARD

    @property
    def outside(self) -> bool:
        """Between two steps, and not in the hands of DDP."""
        if self.has_left:
            return True
        ddp = self.wait is not None and self.wait.kind is not WaitKind.COLLECTIVE
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


def stands_of(attempt: Attempt, hang: Hang) -> list[RankStack]:
    return [
        _stand(
            rank,
            hang.states.get(rank, ""),
            None if rank in hang.silent else data.stack,
            attempt.steps(rank),
        )
        for rank, data in sorted(attempt.ranks.items())
    ]


def _stand(rank: int, state: str, said: StackRecord | None, steps: int) -> RankStack:
    if said is None:
        return RankStack(rank, state, steps, "", None, (), None)
    frames = [frame for frame in said.frames if len(frame) == 3]
    wait = None if state == LEFT else wait_of(frames)
    issued = sum(said.collectives.values()) if said.collectives else None
    # A rank that left in between knows no more than its records.
    step = max(said.step, steps) if state == LEFT else said.step
    return RankStack(rank, state, step, said.moment, wait, frames, issued)


def alike(stands: Sequence[RankStack]) -> list[list[RankStack]]:
    """Ranks that stand at the same place and step, the most numerous first."""
    groups = groups_of({stand.rank: repr((stand.told(), stand.frames)) for stand in stands})
    by_rank = {stand.rank: stand for stand in stands}
    return [[by_rank[rank] for rank in ranks] for _, ranks in groups]


def evidence_of(groups: Sequence[Sequence[RankStack]]) -> list[dict[str, Any]]:
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


def _steps(count: int) -> str:
    return f"step {count - 1}" if count else "no step"

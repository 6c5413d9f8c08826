"""The ranks of a job that hangs: where each one waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hang.stacks import Frame, Wait, WaitKind, user_frame, wait_of
from ddpcheck.analysis.node_notes import Hang
from ddpcheck.records.kinds.hang import StackRecord

LEFT = "left"
# The last event of a rank that is in a training forward, and of one that is between two steps.
_IN_FORWARD = "forward"
_BETWEEN_STEPS = ("after_step", "wrapped", "")


@dataclass(frozen=True)
class RankStack:
    """One rank of a job that hangs, and its stack."""

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
        """Whether DDP communicates in a training forward or backward."""
        return self.wait is not None and self.wait.kind.of_training and not self.evaluates

    @property
    def evaluates(self) -> bool:
        """Whether the rank is in a forward of DDP without gradients; training forwards are recorded as events."""
        kinds = (WaitKind.BUFFERS, WaitKind.FORWARD)
        return self.wait is not None and self.wait.kind in kinds and self.moment != _IN_FORWARD

    @property
    def outside(self) -> bool:
        """Whether the rank is between two steps and not inside DDP."""
        if self.has_left:
            return True
        inside_ddp = self.wait is not None and self.wait.kind is not WaitKind.COLLECTIVE
        return not inside_ddp and self.moment in _BETWEEN_STEPS

    @property
    def location(self) -> str:
        """File and line of the user's code."""
        frame = user_frame(self.frames)
        return "" if frame is None else f"{frame[0]}:{frame[1]}"

    def describe(self, several: bool = False) -> str:
        """What the rank does, as a phrase after "rank 0", or after "ranks 0-2" if `several`."""
        s = "" if several else "s"
        at = f" ({self.location})" if self.location else ""
        if self.has_left:
            return f"{'have' if several else 'has'} ended after {_steps(self.step)}"
        if not self.frames:
            return f"{'are' if several else 'is'} blocked in native code without a readable stack, in step {self.step}"
        if self.wait is None:
            return f"{'are' if several else 'is'} blocked outside communication in step {self.step}{at}"
        what = f"{self.wait.name} without gradients" if self.evaluates else self.wait.name
        when = f"after {_steps(self.step)}" if self.moment in _BETWEEN_STEPS else f"in step {self.step}"
        return f"wait{s} in {what} {when}{at}"


def rank_stacks(attempt: Attempt, hang: Hang) -> list[RankStack]:
    return [
        _rank_stack(
            rank,
            hang.states.get(rank, ""),
            None if rank in hang.silent else data.stack,
            attempt.steps(rank),
        )
        for rank, data in sorted(attempt.ranks.items())
    ]


def _rank_stack(rank: int, state: str, record: StackRecord | None, steps: int) -> RankStack:
    if record is None:
        return RankStack(rank, state, steps, "", None, (), None)
    frames = [frame for frame in record.frames if len(frame) == 3]
    wait = None if state == LEFT else wait_of(frames)
    issued = sum(record.collectives.values()) if record.collectives else None
    # A rank that ended may have taken steps after its stack was written.
    step = max(record.step, steps) if state == LEFT else record.step
    return RankStack(rank, state, step, record.moment, wait, frames, issued)


def group_by_stack(stacks: Sequence[RankStack]) -> list[list[RankStack]]:
    """Ranks grouped by identical stack and step, the largest group first."""
    groups = groups_of({stack.rank: repr((stack.describe(), stack.frames)) for stack in stacks})
    by_rank = {stack.rank: stack for stack in stacks}
    return [[by_rank[rank] for rank in ranks] for _, ranks in groups]


def stack_evidence(groups: Sequence[Sequence[RankStack]]) -> list[dict[str, Any]]:
    """For report.json: one entry per group of ranks with the same stack."""
    return [
        {
            "ranks": [stack.rank for stack in group],
            "step": group[0].step,
            "after": group[0].moment,
            "waits_in": group[0].wait.name if group[0].wait is not None else None,
            "left": group[0].has_left,
            "collectives": {
                str(stack.rank): stack.collectives for stack in group if stack.collectives is not None
            },
            "stack": [f"{file}:{line} in {function}" for file, line, function in group[0].frames],
        }
        for group in groups
    ]


def _steps(count: int) -> str:
    return f"step {count - 1}" if count else "no step"

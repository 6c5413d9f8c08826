"""Stacks of the ranks of a job that hangs: what each one waits in, and which call site led there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hang.collectives import CollectiveConflict, Progress, find_conflict, pending_operation
from ddpcheck.analysis.node_notes import FileLockWait, Hang
from ddpcheck.records.kinds.rank import StackRecord
from ddpcheck.records.reasons import Awaited

Frame = Sequence[Any]  # [file, line, function]

_C10D = "/torch/distributed/"
_DDP = "/torch/nn/parallel/distributed.py"
_AUTOGRAD = "/torch/autograd/"
# Functions of torch, listed in `torch_compat`.
_BUFFERS = ("_sync_buffers", "_sync_module_buffers")
_WRAPPING = ("__init__", "_verify_param_shape_across_processes", "_sync_module_states", "_ddp_init_helper")
# Decorators of torch.distributed: not the function that the user called.
_DECORATORS = ("wrapper", "inner")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")
# A rank in a debugger waits for its user.
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/", "/pydevd", "/debugpy/", "/code.py", "/IPython/")


class WaitKind(str, Enum):
    """The part of the job that communicates."""

    WRAPPING = "wrapping"
    BUFFERS = "buffers"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"

    @property
    def of_training(self) -> bool:
        """Whether DDP itself communicates, within a step."""
        return self in (WaitKind.BUFFERS, WaitKind.FORWARD, WaitKind.BACKWARD)


@dataclass(frozen=True)
class Wait:
    """The communication that a rank waits in. `name` is for messages."""

    kind: WaitKind
    name: str


_DDP_WAITS = {
    WaitKind.WRAPPING: Wait(WaitKind.WRAPPING, "DDP's constructor"),
    WaitKind.BUFFERS: Wait(WaitKind.BUFFERS, "the broadcast of buffers in DDP's forward"),
    WaitKind.FORWARD: Wait(WaitKind.FORWARD, "DDP's forward"),
    WaitKind.BACKWARD: Wait(WaitKind.BACKWARD, "the AllReduce of a backward"),
}


def wait_of(frames: Sequence[Frame]) -> Wait | None:
    """The communication that the innermost calls belong to; None if they belong to none.

    A backward has the same stack whether it computes or communicates, so the stack alone does not show that it waits.
    """
    if not frames:
        return None
    if _AUTOGRAD in _file(frames[0]):
        return _DDP_WAITS[WaitKind.BACKWARD]
    chain = _communicating(frames)
    if not chain:
        return None
    kind = _kind_of_ddp(chain)
    if kind is not None:
        return _DDP_WAITS[kind]
    called = [str(frame[2]) for frame in chain if frame[2] not in _DECORATORS]
    return Wait(WaitKind.COLLECTIVE, called[-1] if called else "a collective")


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code, else the innermost outside torch."""
    for foreign in (_LIBRARIES, ("/torch/", "<frozen ")):
        for frame in frames:
            if not any(mark in _file(frame) for mark in foreign):
                return frame
    return None


def in_debugger(frames: Sequence[Frame]) -> bool:
    return any(mark in _file(frame) for frame in frames for mark in _DEBUGGERS)


def _communicating(frames: Sequence[Frame]) -> list[Frame]:
    """The innermost calls, up to the first outside torch.distributed and DDP."""
    chain: list[Frame] = []
    for frame in frames:
        if _C10D not in _file(frame) and _DDP not in _file(frame):
            break
        chain.append(frame)
    return chain


def _kind_of_ddp(chain: Sequence[Frame]) -> WaitKind | None:
    inside = [frame[2] for frame in chain if _DDP in _file(frame)]
    if not inside:
        return None
    if any(name in _BUFFERS for name in inside):
        return WaitKind.BUFFERS
    return WaitKind.WRAPPING if any(name in _WRAPPING for name in inside) else WaitKind.FORWARD


def _file(frame: Frame) -> str:
    return str(frame[0])


LEFT = "left"
SPINS = "spins"
LOCKED = "locked"
LOADER = "loader"
BUSY = "busy"
# The kernel function of a thread that sleeps on a timer.
_TIMER_SLEEP = "nanosleep"
# The last event of a rank that is in a training forward, and of one that is between two steps.
_IN_FORWARD = "forward"
_BETWEEN_STEPS = ("after_step", "wrapped", "")


# [file, function, first line, last line]
Loop = tuple[str, str, int, int]


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
    progress: Progress = field(default_factory=dict)
    # The loops of the user's code around the current calls, innermost first; None: not known.
    loops: Sequence[Loop] | None = None
    # The rank that holds the file lock for which this one waits (None: not a rank), and the file.
    lock: tuple[int | None, str] | None = None
    # Process ids of the data-loader workers that owe a batch.
    workers: Sequence[int] = ()
    sleeps_in: str = ""

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
    def may_go_on(self) -> bool:
        """Whether the launcher could not tell that the rank is stuck."""
        return self.state == BUSY

    @property
    def activity(self) -> str:
        """What the training thread of a rank that may go on did when it was last asked, as a phrase after "it"."""
        if _TIMER_SLEEP in self.sleeps_in:
            return "sleeps between polls of something it waits for"
        if self.sleeps_in in ("", "0"):
            return "uses the processor there"
        return (
            f"waits there for something outside of the job's communication (in the kernel: {self.sleeps_in})"
        )

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
        if self.lock is not None:
            return f"wait{s} for the lock of {self.lock[1] or 'a file'} in step {self.step}{at}"
        if self.state == LOADER:
            return f"wait{s} for a data-loader worker that does not answer, in step {self.step}{at}"
        if self.wait is None and self.may_go_on:
            return f"{'are' if several else 'is'} outside communication in step {self.step}{at}"
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
            _lock(attempt, hang.locks.get(rank)),
            hang.sleeps_in.get(rank, ""),
        )
        for rank, data in sorted(attempt.ranks.items())
    ]


def _lock(attempt: Attempt, lock: FileLockWait | None) -> tuple[int | None, str] | None:
    if lock is None:
        return None
    holders = [rank for rank, data in attempt.ranks.items() if data.header.pid == lock.holder]
    return (holders[0] if holders else None), lock.file


def _rank_stack(
    rank: int,
    state: str,
    record: StackRecord | None,
    steps: int,
    lock: tuple[int | None, str] | None,
    sleeps_in: str,
) -> RankStack:
    if record is None:
        return RankStack(rank, state, steps, "", None, (), None, lock=lock, sleeps_in=sleeps_in)
    frames = [frame for frame in record.frames if len(frame) == 3]
    wait = None if state == LEFT else wait_of(frames)
    if state == SPINS and wait is None:
        wait = Wait(WaitKind.COLLECTIVE, pending_operation(record.progress()) or "a collective")
    issued = sum(record.collectives.values()) if record.collectives else None
    # A rank that ended may have taken steps after its stack was written.
    step = max(record.step, steps) if state == LEFT else record.step
    loops = [(row[0], row[1], row[2], row[3]) for row in record.loops if len(row) == 4]
    workers = (
        record.awaits[1] if record.awaits[:1] == [Awaited.LOADER.value] and len(record.awaits) > 1 else []
    )
    return RankStack(
        rank,
        state,
        step,
        record.moment,
        wait,
        frames,
        issued,
        record.progress(),
        loops or None,
        lock,
        workers if isinstance(workers, list) else [],
        sleeps_in,
    )


def collective_conflict(stacks: Sequence[RankStack]) -> CollectiveConflict | None:
    """The first collective in which ranks differ. Ranks that have left no longer take part."""
    return find_conflict(
        {stack.rank: stack.progress for stack in stacks if stack.progress and not stack.has_left}
    )


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

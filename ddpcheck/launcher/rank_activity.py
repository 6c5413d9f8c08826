"""Classifies what each rank does between two samples of its stack and of its process: does it wait, or may it go on?

A rank counts as stuck only where that is proven. Whatever may go on by itself, or may be woken by something outside of
the job, is busy.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ddpcheck.analysis.hang.collectives import ConflictKind, find_conflict, has_pending
from ddpcheck.analysis.hang.stacks import Frame, WaitKind, in_debugger, wait_of
from ddpcheck.launcher.process.process_table import FUTEX_SLEEP, TICKS_PER_SECOND, Activity
from ddpcheck.records.backend_names import is_gloo, is_nccl
from ddpcheck.records.kinds.rank import StackRecord
from ddpcheck.records.reasons import Awaited

# A waiting thread uses no processor time; up to this many ticks may still be charged for earlier work.
_IDLE_TICKS = 2
# Processor share of all threads of a process below which it counts as idle.
_IDLE_SHARE = 0.02
# Processor share that other threads of a waiting rank may use without counting as work, such as a progress bar.
_WORKING_SHARE = 0.25
# Context switches that do not count as progress: a thread in a collective wakes up to check its timeout.
_IDLE_SWITCHES = 2
# A collective that transfers less than this is stuck, not slow. Answering a request writes a few KB.
_IDLE_BYTES = 256 << 10
# The line of the standard library in which `Event.wait`, `queue.get` and all that use a condition wait up to a limit.
_CONDITION_MODULE = "/threading.py"
_LIMITED_WAIT = "acquire(True, timeout)"


class RankActivityState(str, Enum):
    """What a rank does, according to two samples."""

    WAITS = "waits"  # in communication, no activity
    SPINS = "spins"  # polls a collective that it enqueued, or waits for a device that does
    LOCKED = "locked"  # waits for a file lock that a rank holds which is stuck itself
    LOADER = "loader"  # waits for a data-loader worker that cannot answer
    STILL = "still"  # outside communication, no activity
    LEFT = "left"  # its process group is destroyed, or its process has ended
    BUSY = "busy"  # active, or may continue by itself
    UNKNOWN = "unknown"  # cannot answer requests


@dataclass(frozen=True)
class ActivitySample:
    """One sample of a rank: its stack and the counters of its process."""

    time: float
    standing: StackRecord | None = None
    activity: Activity | None = None
    left: bool = False
    # Of the data-loader workers that owe a batch, by process id; None: its counters cannot be read.
    workers: Mapping[int, Activity | None] = field(default_factory=dict)

    @property
    def awaits(self) -> Sequence[object]:
        """`StackRecord.awaits`, empty without a stack."""
        return self.standing.awaits if self.standing is not None else ()

    @property
    def sleeps_in(self) -> str:
        """The kernel function in which the training thread sleeps; empty if unknown."""
        return self.activity.sleeps_in if self.activity is not None else ""


def classify(before: ActivitySample, now: ActivitySample, backend: str) -> RankActivityState:
    """The state of a rank between two samples."""
    if now.left:
        return RankActivityState.LEFT
    if before.standing is None or now.standing is None or before.activity is None or now.activity is None:
        return _classify_without_stack(before, now)
    if now.standing.left and before.standing.left:
        return RankActivityState.LEFT
    if now.standing.frames != before.standing.frames or in_debugger(now.standing.frames):
        return RankActivityState.BUSY
    wait = wait_of(now.standing.frames)
    if wait is None:
        waits_by_clock = now.activity.timed_wait or _waits_up_to_a_limit(now.standing.frames)
        return (
            RankActivityState.STILL
            if _is_idle(before, now) and not waits_by_clock
            else RankActivityState.BUSY
        )
    idle = _spins(backend, wait.kind) or _thread_is_idle(before.activity, now.activity)
    return RankActivityState.WAITS if idle and _rest_is_idle(before, now) else RankActivityState.BUSY


# States of a rank that does not go on by itself, and those that prove that it waits for another rank.
STUCK = frozenset(RankActivityState) - {RankActivityState.BUSY, RankActivityState.UNKNOWN}
_HOLDS_ON = STUCK - {RankActivityState.LEFT}


def classify_all(
    before: Mapping[int, ActivitySample], now: Mapping[int, ActivitySample], backends: Mapping[int, str]
) -> dict[int, RankActivityState]:
    """The states of all ranks.

    A rank that looks busy may wait for another one all the same: it polls a collective, waits for the device, for a
    file lock or for a data-loader worker. That needs evidence of its own, and counts only if what it waits for is
    stuck.
    """
    states = {rank: classify(before[rank], sample, backends[rank]) for rank, sample in now.items()}
    claims: dict[int, RankActivityState] = {}
    for rank, state in states.items():
        claim = _claim(before[rank], now[rank], backends[rank])
        if state is RankActivityState.BUSY and claim is not None:
            claims[rank] = claim
    # Ranks may wait for each other in a circle: assume all claims, and drop those that do not hold, until all do.
    while True:
        assumed = states | claims
        unproven = [rank for rank in claims if not _holds(rank, assumed, now)]
        if not unproven:
            return assumed
        for rank in unproven:
            del claims[rank]


def _claim(before: ActivitySample, now: ActivitySample, backend: str) -> RankActivityState | None:
    """What the rank waits for, by positive evidence in both samples; None if it may just as well work."""
    old, new = before.activity, now.activity
    if old is None or new is None or not _no_transfer(old, new):
        return None
    if now.standing is not None and in_debugger(now.standing.frames):
        return None
    if old.lock_holder and old.lock_holder == new.lock_holder and _thread_is_idle(old, new):
        return RankActivityState.LOCKED
    if not now.awaits or list(before.awaits) != list(now.awaits):
        return None
    match now.awaits:
        case [Awaited.WORK.value, *_]:
            return RankActivityState.SPINS
        case [Awaited.LOADER.value, *_]:
            return RankActivityState.LOADER if _workers_are_stuck(before, now) else None
        case [Awaited.DEVICE.value, *_] if not is_gloo(backend):
            return RankActivityState.SPINS if _same_pending_collective(before, now) else None
    return None


def _same_pending_collective(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether the rank stands at the same call with the same collectives, of which one is pending."""
    old, new = before.standing, now.standing
    if old is None or new is None:
        return False
    return old.frames == new.frames and old.groups == new.groups and has_pending(new.progress())


def _workers_are_stuck(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether every worker that owes a batch waits for a lock in its own process, without a time limit."""
    old, new = before.activity, now.activity
    if old is None or new is None or not (old.others_parked and new.others_parked):
        return False
    if not now.workers or before.workers.keys() != now.workers.keys():
        return False
    return all(
        earlier is not None
        and later is not None
        and not later.timed_wait
        and later.others_parked
        and _activity_is_idle(earlier, later, now.time - before.time)
        for earlier, later in ((before.workers[pid], now.workers[pid]) for pid in now.workers)
    )


def _holds(rank: int, assumed: Mapping[int, RankActivityState], now: Mapping[int, ActivitySample]) -> bool:
    """Whether the claim of a rank holds if those of the others do."""
    sample, state = now[rank], assumed[rank]
    if state is RankActivityState.LOADER:
        return True
    if state is RankActivityState.LOCKED:
        return _holder_is_stuck(sample, assumed, now)
    # A rank that works may still enqueue the collective.
    if not STUCK.issuperset(assumed.values()):
        return False
    return sample.awaits[0] == Awaited.WORK.value or _lacks_a_stuck_rank(assumed, now)


def _holder_is_stuck(
    sample: ActivitySample, assumed: Mapping[int, RankActivityState], now: Mapping[int, ActivitySample]
) -> bool:
    """Whether a rank holds the lock that is stuck itself, and no other thread of it may release the lock."""
    holder = sample.activity.lock_holder if sample.activity is not None else 0
    return any(
        other.activity is not None
        and other.activity.pid == holder
        and other.activity.others_parked
        and assumed[number] in _HOLDS_ON
        for number, other in now.items()
    )


def _lacks_a_stuck_rank(assumed: Mapping[int, RankActivityState], now: Mapping[int, ActivitySample]) -> bool:
    """Whether the collective behind which a device waits cannot complete, by the numbers of collectives.

    Either ranks enqueued different ones, or ranks that are known to be stuck have not enqueued it. Where all have
    enqueued it, the device may only be slow.
    """
    known = {rank: sample.standing.progress() for rank, sample in now.items() if sample.standing is not None}
    conflict = find_conflict(known)
    if conflict is None:
        return RankActivityState.LEFT in assumed.values()
    if conflict.kind is ConflictKind.MISSING:
        stuck = (
            RankActivityState.STILL,
            RankActivityState.LEFT,
            RankActivityState.LOCKED,
            RankActivityState.LOADER,
        )
        return all(assumed[rank] in stuck for rank in conflict.ranks)
    return conflict.kind is ConflictKind.MISMATCH


def _waits_up_to_a_limit(frames: Sequence[Frame]) -> bool:
    """Whether the innermost call is a wait for a condition with a time limit, according to its source line.

    For systems that hide system calls. `Condition.wait` acquires its lock in one line with a limit, in another without.
    """
    if not frames or not str(frames[0][0]).endswith(_CONDITION_MODULE):
        return False
    return _LIMITED_WAIT in linecache.getline(str(frames[0][0]), int(frames[0][1]))


def _classify_without_stack(before: ActivitySample, now: ActivitySample) -> RankActivityState:
    """Native code holds the GIL, so there is no stack: only the process counters show whether it works.

    A wait with a time limit does not count as activity here: Python's own releases the GIL, and a collective's is
    limited by the timeout of its process group.
    """
    if before.activity is None or now.activity is None:
        return RankActivityState.UNKNOWN
    return RankActivityState.STILL if _is_idle(before, now) else RankActivityState.BUSY


def _spins(backend: str, kind: WaitKind) -> bool:
    """With NCCL, a thread that waits for the device uses a full core. This does not apply to a backward pass."""
    return is_nccl(backend) and kind is not WaitKind.BACKWARD


def _thread_is_idle(before: Activity, now: Activity) -> bool:
    return (
        now.thread_ticks - before.thread_ticks <= _IDLE_TICKS
        and now.thread_switches - before.thread_switches <= _IDLE_SWITCHES
    )


def _rest_is_idle(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether no other thread or process of the rank works, such as a slow transfer or an asynchronous save."""
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    others = (new.ticks - new.thread_ticks) - (old.ticks - old.thread_ticks)
    return others < _WORKING_SHARE * TICKS_PER_SECOND * (now.time - before.time) and _no_transfer(old, new)


def _no_transfer(before: Activity, now: Activity) -> bool:
    return now.bytes - before.bytes < _IDLE_BYTES


def _is_idle(before: ActivitySample, now: ActivitySample) -> bool:
    """Whether the rank is idle outside communication: all threads, and all processes that it started.

    A thread that sleeps on a timer wakes up by itself. A thread that waits for a file, a socket, a terminal or another
    process may be woken from outside, and may then wake the training thread. None of them counts as a hang.
    """
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    return new.others_parked and _activity_is_idle(old, new, now.time - before.time)


def _activity_is_idle(old: Activity, new: Activity, seconds: float) -> bool:
    return (
        FUTEX_SLEEP in old.sleeps_in
        and FUTEX_SLEEP in new.sleeps_in
        and not new.by_clock
        and _thread_is_idle(old, new)
        and new.switches - old.switches <= _IDLE_SWITCHES
        and new.ticks - old.ticks <= max(_IDLE_TICKS, _IDLE_SHARE * TICKS_PER_SECOND * seconds)
        and _no_transfer(old, new)
    )

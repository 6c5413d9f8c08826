"""Tells, from two looks at a rank some time apart, whether it waits, stands still or is merely slow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ddpcheck.analysis.hang.stacks import WaitKind, in_debugger, wait_of
from ddpcheck.launcher.process.process_table import TICKS_A_SECOND, Activity
from ddpcheck.records.kinds.hang import StackRecord

# A thread that waits uses no processor at all; a tick may be charged to it for what it did just before.
_IDLE_TICKS = 2
# What all threads of a process together may use and still do nothing of note.
_IDLE_SHARE = 0.02
# What threads beside one that waits may use and still bring nobody further, such as a progress bar's.
_WORKING_SHARE = 0.25
# Waking up now and then, to look at a clock, is no progress of a thread that is in a collective.
_IDLE_SWITCHES = 2
# A collective that moves less than this is not slow but stuck. Answering a question writes a few KB.
_IDLE_BYTES = 256 << 10
# Sleeping until another thread does something, as opposed to a clock, a file, a socket or another process.
_FUTEX = "futex"


class RankActivityState(str, Enum):
    """How a rank stands."""

    WAITS = "waits"  # in communication, and nothing moves
    STILL = "still"  # outside communication, and nothing moves
    LEFT = "left"  # its process group is closed, or its process gone
    BUSY = "busy"  # it moves, or may yet move by itself
    UNKNOWN = "unknown"  # it could not be asked


@dataclass(frozen=True)
class ActivitySample:
    """One look at a rank: what it said, and what its process showed."""

    time: float
    standing: StackRecord | None = None
    activity: Activity | None = None
    left: bool = False

    @property
    def sleeps_in(self) -> str:
        """The system's word for what the training thread waits in; empty where it does not tell."""
        return self.activity.sleeps_in if self.activity is not None else ""


def state_of(before: ActivitySample, now: ActivitySample, backend: str) -> RankActivityState:
    """What became of a rank between two looks."""
    if now.left:
        return RankActivityState.LEFT
    if before.standing is None or now.standing is None or before.activity is None or now.activity is None:
        return _unanswered(before, now)
    if now.standing.left and before.standing.left:
        return RankActivityState.LEFT
    if now.standing.frames != before.standing.frames or in_debugger(now.standing.frames):
        return RankActivityState.BUSY
    wait = wait_of(now.standing.frames)
    if wait is None:
        return RankActivityState.STILL if _nothing_moves(before, now) else RankActivityState.BUSY
    rests = _spins(backend, wait.kind) or _thread_rests(before.activity, now.activity)
    return RankActivityState.WAITS if rests and _surroundings_rest(before, now) else RankActivityState.BUSY


def _unanswered(before: ActivitySample, now: ActivitySample) -> RankActivityState:
    """The interpreter's lock is held by native code: whether that works, only the system can tell."""
    if before.activity is None or now.activity is None:
        return RankActivityState.UNKNOWN
    return RankActivityState.STILL if _nothing_moves(before, now) else RankActivityState.BUSY


def _spins(backend: str, kind: WaitKind) -> bool:
    """NCCL keeps a processor busy while a thread waits for the device; of a backward that says nothing."""
    return "nccl" in backend and kind is not WaitKind.BACKWARD


def _thread_rests(before: Activity, now: Activity) -> bool:
    return (
        now.thread_ticks - before.thread_ticks <= _IDLE_TICKS
        and now.thread_switches - before.thread_switches <= _IDLE_SWITCHES
    )


def _surroundings_rest(before: ActivitySample, now: ActivitySample) -> bool:
    """Another thread or process of the rank may yet bring what all wait for: a slow transfer, an async save."""
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    others = (new.ticks - new.thread_ticks) - (old.ticks - old.thread_ticks)
    return others < _WORKING_SHARE * TICKS_A_SECOND * (now.time - before.time) and _bytes_rest(old, new)


def _bytes_rest(before: Activity, now: Activity) -> bool:
    return now.bytes - before.bytes < _IDLE_BYTES


def _nothing_moves(before: ActivitySample, now: ActivitySample) -> bool:
    """Outside communication much more has to rest: any thread, and any process that the rank started.

    A thread that sleeps by a clock wakes by itself, and one that waits for a file, a socket, a terminal or
    another process waits for something that cannot be seen from here: neither makes a hang.
    """
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    return (
        _FUTEX in old.sleeps_in
        and _FUTEX in new.sleeps_in
        and not new.by_clock
        and _thread_rests(old, new)
        and new.switches - old.switches <= _IDLE_SWITCHES
        and new.ticks - old.ticks <= max(_IDLE_TICKS, _IDLE_SHARE * TICKS_A_SECOND * (now.time - before.time))
        and _bytes_rest(old, new)
    )

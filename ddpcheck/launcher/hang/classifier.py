"""Classifies a rank by two samples of its activity: waiting, idle, ended, or still working."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ddpcheck.analysis.hang.stacks import WaitKind, in_debugger, wait_of
from ddpcheck.launcher.process.process_table import TICKS_PER_SECOND, Activity
from ddpcheck.records.kinds.rank import StackRecord

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
# Waiting for another thread, as opposed to a timer, a file, a socket or another process.
_FUTEX = "futex"


class RankActivityState(str, Enum):
    """What a rank does, according to two samples."""

    WAITS = "waits"  # in communication, no activity
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
        return RankActivityState.STILL if _is_idle(before, now) else RankActivityState.BUSY
    idle = _spins(backend, wait.kind) or _thread_is_idle(before.activity, now.activity)
    return RankActivityState.WAITS if idle and _rest_is_idle(before, now) else RankActivityState.BUSY


def _classify_without_stack(before: ActivitySample, now: ActivitySample) -> RankActivityState:
    """Native code holds the GIL, so there is no stack: only the process counters show whether it works."""
    if before.activity is None or now.activity is None:
        return RankActivityState.UNKNOWN
    return RankActivityState.STILL if _is_idle(before, now) else RankActivityState.BUSY


def _spins(backend: str, kind: WaitKind) -> bool:
    """With NCCL, a thread that waits for the device uses a full core. This does not apply to a backward pass."""
    return "nccl" in backend and kind is not WaitKind.BACKWARD


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

    A thread that sleeps on a timer wakes up by itself. A thread that waits for a file, a socket, a terminal or
    another process may be woken from outside. Neither counts as a hang.
    """
    old, new = before.activity, now.activity
    if old is None or new is None:
        return False
    return (
        _FUTEX in old.sleeps_in
        and _FUTEX in new.sleeps_in
        and not new.by_clock
        and _thread_is_idle(old, new)
        and new.switches - old.switches <= _IDLE_SWITCHES
        and new.ticks - old.ticks
        <= max(_IDLE_TICKS, _IDLE_SHARE * TICKS_PER_SECOND * (now.time - before.time))
        and _no_transfer(old, new)
    )

"""Classification of ranks by two samples."""

from __future__ import annotations

import fcntl
import inspect
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.launcher.process.process_table import TICKS_PER_SECOND, Activity, read_activity
from ddpcheck.launcher.rank_activity import ActivitySample, RankActivityState, classify, classify_all
from ddpcheck.records.kinds.rank import StackRecord
from tests.unit.analysis.hang.test_stacks import BACKWARD, BARRIER, MAIN, USER

SECONDS = 150.0
RESTING = Activity(100, 50, "futex_do_wait", False, 1000, 5000, 1 << 20)
ELSEWHERE = [USER, MAIN]


def sighting(
    frames: list[Any] | None, at: float = 0.0, left: bool = False, **activity: Any
) -> ActivitySample:
    message = None if frames is None else StackRecord(1, at, frames, left=left)
    return ActivitySample(at, message, replace(RESTING, **activity))


def became(
    frames: list[Any] | None, then: list[Any] | None = None, backend: str = "gloo", **moved: Any
) -> RankActivityState:
    """The state of a rank with the stack `frames`, then `then`, and these counter increases."""
    later = sighting(frames if then is None else then, SECONDS)
    assert later.activity is not None
    moving = {
        name: value if isinstance(value, (str, bool)) else getattr(RESTING, name) + value
        for name, value in moved.items()
    }
    later = replace(later, activity=replace(later.activity, **moving))
    return classify(sighting(frames), later, backend)


@pytest.mark.parametrize("frames", [BARRIER, BACKWARD])
def test_in_communication_without_activity(frames: list[Any]) -> None:
    assert became(frames) is RankActivityState.WAITS
    # Single ticks, wake-ups and nearly idle threads do not count.
    assert (
        became(frames, thread_ticks=1, thread_switches=1, switches=9000, ticks=100) is RankActivityState.WAITS
    )


@pytest.mark.parametrize(
    "moved",
    [
        {"thread_ticks": 500},
        {"thread_switches": 30},
        {"bytes": 10 << 20},
        {"ticks": int(0.5 * SECONDS * TICKS_PER_SECOND)},
    ],
)
def test_in_communication_with_activity(moved: dict[str, int]) -> None:
    """A backward pass, a transfer on a slow link, another busy thread."""
    assert became(BACKWARD, **moved) is RankActivityState.BUSY


def test_a_changed_stack_is_busy() -> None:
    assert became(BARRIER, BACKWARD) is RankActivityState.BUSY
    assert became(ELSEWHERE, [["/home/me/train.py", 42, "main"], MAIN]) is RankActivityState.BUSY


def test_nccl_spins_in_a_collective_but_not_in_a_backward() -> None:
    spinning = int(SECONDS * TICKS_PER_SECOND)
    assert became(BARRIER, backend="nccl", thread_ticks=spinning, ticks=spinning) is RankActivityState.WAITS
    assert became(BARRIER, backend="gloo", thread_ticks=spinning, ticks=spinning) is RankActivityState.BUSY
    assert became(BACKWARD, backend="nccl", thread_ticks=spinning, ticks=spinning) is RankActivityState.BUSY


def test_blocked_on_a_lock_outside_communication() -> None:
    assert became(ELSEWHERE) is RankActivityState.STILL


@pytest.mark.parametrize(
    "moved",
    [
        {"thread_ticks": 500},
        {"switches": 50},
        {"ticks": 5000},
        {"bytes": 10 << 20},
        {"by_clock": True},
        {"timed_wait": True},
        {"sleeps_in": "hrtimer_nanosleep"},
        {"sleeps_in": "do_wait"},
        {"sleeps_in": "n_tty_read"},
        {"sleeps_in": "sk_wait_data"},
        # The kernel function is unknown.
        {"sleeps_in": "0"},
    ],
)
def test_outside_communication_any_activity_is_busy(moved: dict[str, Any]) -> None:
    assert became(ELSEWHERE, **moved) is RankActivityState.BUSY


def test_a_time_limit_of_a_collective_is_no_activity() -> None:
    """gloo waits with the timeout of its process group."""
    assert became(BARRIER, timed_wait=True) is RankActivityState.WAITS
    assert (
        classify(sighting(None), sighting(None, SECONDS, timed_wait=True), "gloo") is RankActivityState.STILL
    )


def test_a_time_limit_in_the_source_line() -> None:
    """Where the kernel does not show system calls."""
    lines = inspect.getsource(threading).splitlines()
    limited = next(number for number, line in enumerate(lines, 1) if "acquire(True, timeout)" in line)
    unlimited = next(number for number, line in enumerate(lines, 1) if line.strip() == "waiter.acquire()")
    assert became([[threading.__file__, limited, "wait"], USER]) is RankActivityState.BUSY
    assert became([[threading.__file__, unlimited, "wait"], USER]) is RankActivityState.STILL


@pytest.mark.parametrize(("seconds", "timed"), [(60.0, True), (None, False)])
def test_the_kernel_shows_a_time_limit(seconds: float | None, timed: bool) -> None:
    """A process of one thread that waits for an event."""
    program = f"import threading; print(flush=True); threading.Event().wait({seconds})"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                activity = read_activity(process.pid, process.pid, (), ())
                if "futex" in activity.sleeps_in:
                    break
                time.sleep(0.01)
            assert activity.timed_wait is timed
        finally:
            process.kill()


def test_in_a_debugger() -> None:
    assert became([["/usr/lib/python3.11/pdb.py", 4, "interaction"], USER]) is RankActivityState.BUSY


def test_without_a_stack_the_process_counters_decide() -> None:
    assert classify(sighting(None), sighting(None, SECONDS), "gloo") is RankActivityState.STILL
    assert (
        classify(sighting(None), sighting(None, SECONDS, thread_ticks=9999), "gloo") is RankActivityState.BUSY
    )
    assert classify(ActivitySample(0.0), ActivitySample(SECONDS), "gloo") is RankActivityState.UNKNOWN


def test_ended_ranks() -> None:
    working = sighting(BARRIER, SECONDS, thread_ticks=9999)
    assert classify(working, ActivitySample(SECONDS, left=True), "gloo") is RankActivityState.LEFT
    # Its process runs, but its process group is destroyed.
    left = sighting(ELSEWHERE, 0.0, left=True)
    assert (
        classify(left, sighting(BARRIER, SECONDS, left=True, thread_ticks=9999), "gloo")
        is RankActivityState.LEFT
    )


PENDING = {"0": [5, 4, [[5, "all_reduce", [[4]], "scheduled"]], [0, 1]]}
BEHIND = {"0": [4, 4, [], [0, 1]]}
BOTH = {"0": PENDING["0"]}
POLLS = ["work", 140_000_000]
DEVICE = ["device", "item"]


def states_of(
    other: list[Any],
    groups: dict[str, list[Any]],
    awaits: list[Any] | None = None,
    backend: str = "nccl",
    lines: tuple[int, int] = (41, 41),
    **moved: Any,
) -> dict[int, RankActivityState]:
    """Rank 0 uses a full core with collective 5 pending; rank 1 has the stack `other`."""

    def at(line: int, then: float, ticks: int) -> dict[int, ActivitySample]:
        poll = StackRecord(
            1, then, [["/home/me/train.py", line, "main"]], groups=PENDING, awaits=awaits or []
        )
        rest = StackRecord(1, then, other, groups=groups)
        busy = replace(RESTING, thread_ticks=100 + ticks, ticks=1000 + ticks)
        moving = {name: getattr(RESTING, name) + (value if then else 0) for name, value in moved.items()}
        return {
            0: ActivitySample(then, poll, busy),
            1: ActivitySample(then, rest, replace(RESTING, **moving)),
        }

    return classify_all(at(lines[0], 0.0, 0), at(lines[1], SECONDS, 9000), {0: backend, 1: backend})


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("other", "groups"), [(ELSEWHERE, BEHIND), (BARRIER, BOTH), (BARRIER, BEHIND)])
def test_a_rank_that_computes_with_a_pending_collective(
    other: list[Any], groups: dict[str, list[Any]], backend: str
) -> None:
    """Without evidence that it polls, numbers of collectives prove nothing: entries may never be retired."""
    assert states_of(other, groups, backend=backend)[0] is RankActivityState.BUSY


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_that_polls_its_own_collective(backend: str) -> None:
    for other, groups in ((ELSEWHERE, BEHIND), (BARRIER, BOTH)):
        states = states_of(other, groups, POLLS, backend, lines=(41, 42))
        assert states[0] is RankActivityState.SPINS


def test_a_rank_that_works_may_still_enqueue_the_collective() -> None:
    for awaits in (POLLS, DEVICE):
        states = states_of(ELSEWHERE, BEHIND, awaits, thread_ticks=9000, ticks=9000)
        assert states == {0: RankActivityState.BUSY, 1: RankActivityState.BUSY}


def test_a_rank_that_waits_for_the_device() -> None:
    assert states_of(ELSEWHERE, BEHIND, DEVICE) == {0: RankActivityState.SPINS, 1: RankActivityState.STILL}
    # Another line: it goes on. The processor has no queue of work.
    assert states_of(ELSEWHERE, BEHIND, DEVICE, lines=(41, 42))[0] is RankActivityState.BUSY
    assert states_of(ELSEWHERE, BEHIND, DEVICE, "gloo")[0] is RankActivityState.BUSY


def test_a_device_may_be_slow_where_all_ranks_enqueued_the_collective() -> None:
    assert states_of(BARRIER, BOTH, DEVICE)[0] is RankActivityState.BUSY


def test_a_rank_that_waits_elsewhere_may_need_the_rank_that_waits_for_its_device() -> None:
    assert states_of(BARRIER, BEHIND, DEVICE)[0] is RankActivityState.BUSY


def two_ranks(
    first: Activity, second: Activity, frames: list[Any], **fields: Any
) -> dict[int, RankActivityState]:
    """Rank 0 is outside of communication, rank 1 has these frames; no counter moves."""

    def at(then: float) -> dict[int, ActivitySample]:
        return {
            0: ActivitySample(then, StackRecord(1, then, ELSEWHERE, **fields), first),
            1: ActivitySample(then, StackRecord(1, then, frames), second),
        }

    return classify_all(at(0.0), at(SECONDS), {0: "gloo", 1: "gloo"})


LOCK = replace(RESTING, sleeps_in="locks_lock_inode_wait", lock_holder=700, pid=600)
HOLDER = replace(RESTING, pid=700)


def test_a_file_lock_that_a_waiting_rank_holds() -> None:
    assert two_ranks(LOCK, HOLDER, BARRIER) == {0: RankActivityState.LOCKED, 1: RankActivityState.WAITS}


@pytest.mark.parametrize(
    "holder",
    [
        replace(HOLDER, pid=701),  # a process outside of the job
        replace(HOLDER, others_parked=False),  # another thread may release it
    ],
)
def test_a_file_lock_that_may_be_released(holder: Activity) -> None:
    assert two_ranks(LOCK, holder, BARRIER)[0] is RankActivityState.BUSY


def test_a_file_lock_of_a_rank_that_works() -> None:
    sleeps = replace(HOLDER, sleeps_in="hrtimer_nanosleep", by_clock=True)
    assert two_ranks(LOCK, sleeps, ELSEWHERE) == {0: RankActivityState.BUSY, 1: RankActivityState.BUSY}


def test_two_ranks_that_hold_the_lock_of_each_other() -> None:
    other = replace(LOCK, lock_holder=600, pid=700)
    assert set(two_ranks(LOCK, other, ELSEWHERE).values()) == {RankActivityState.LOCKED}


def loader_states(worker: Activity | None, later: Activity | None, **rank: Any) -> RankActivityState:
    """Rank 0 waits for worker 900, rank 1 in a barrier."""
    polls = replace(RESTING, sleeps_in="poll_schedule_timeout", **rank)

    def at(then: float, activity: Activity | None) -> dict[int, ActivitySample]:
        record = StackRecord(1, then, ELSEWHERE, awaits=["loader", [900], []])
        turns = replace(polls, thread_switches=50 + int(then), switches=5000 + int(then))
        return {
            0: ActivitySample(then, record, turns, workers={900: activity}),
            1: ActivitySample(then, StackRecord(1, then, BARRIER), RESTING),
        }

    return classify_all(at(0.0, worker), at(SECONDS, later), {0: "gloo", 1: "gloo"})[0]


def test_a_worker_that_cannot_answer() -> None:
    assert loader_states(RESTING, RESTING) is RankActivityState.LOADER


@pytest.mark.parametrize(
    "later",
    [
        None,
        replace(RESTING, ticks=9999),
        replace(RESTING, bytes=1 << 30),
        replace(RESTING, by_clock=True),
        replace(RESTING, timed_wait=True),
        replace(RESTING, others_parked=False),
        replace(RESTING, sleeps_in="sk_wait_data"),
    ],
)
def test_a_worker_that_may_answer(later: Activity | None) -> None:
    assert loader_states(RESTING, later) is RankActivityState.BUSY


def test_a_thread_of_the_rank_may_wake_the_worker() -> None:
    assert loader_states(RESTING, RESTING, others_parked=False) is RankActivityState.BUSY


def test_a_thread_that_waits_for_something_outside_may_wake_the_training_thread() -> None:
    assert became(ELSEWHERE) is RankActivityState.STILL
    assert became(ELSEWHERE, others_parked=False) is RankActivityState.BUSY


def test_the_holder_of_a_file_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX)"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-c", code, str(path)])
        try:
            end = time.monotonic() + 30
            activity = read_activity(process.pid, process.pid, (), ())
            while not activity.lock_holder and time.monotonic() < end:
                time.sleep(0.05)
                activity = read_activity(process.pid, process.pid, (), ())
            assert (activity.lock_holder, activity.lock_file) == (os.getpid(), str(path))
        finally:
            process.kill()
            process.wait()

"""Classification of ranks by two samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.launcher.hang_detector import ActivitySample, RankActivityState, classify, classify_all
from ddpcheck.launcher.process.process_table import TICKS_PER_SECOND, Activity
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


def states_of(other: list[Any], groups: dict[str, list[Any]], **moved: Any) -> dict[int, RankActivityState]:
    """Rank 0 polls collective 5 at changing lines; rank 1 has the stack `other`."""

    def at(line: int, then: float, ticks: int) -> dict[int, ActivitySample]:
        poll = StackRecord(1, then, [["/home/me/train.py", line, "main"]], groups=PENDING)
        rest = StackRecord(1, then, other, groups=groups)
        busy = replace(RESTING, thread_ticks=100 + ticks, ticks=1000 + ticks)
        moving = {name: getattr(RESTING, name) + (value if then else 0) for name, value in moved.items()}
        return {
            0: ActivitySample(then, poll, busy),
            1: ActivitySample(then, rest, replace(RESTING, **moving)),
        }

    return classify_all(at(41, 0.0, 0), at(42, SECONDS, 9000), {0: "nccl", 1: "nccl"})


def test_a_rank_spins_while_the_rank_that_it_needs_is_stuck() -> None:
    assert states_of(ELSEWHERE, BEHIND) == {0: RankActivityState.SPINS, 1: RankActivityState.STILL}


def test_a_rank_that_works_may_still_enqueue_the_collective() -> None:
    states = states_of(ELSEWHERE, BEHIND, thread_ticks=9000, ticks=9000)
    assert states == {0: RankActivityState.BUSY, 1: RankActivityState.BUSY}


def test_a_rank_that_waits_elsewhere_may_need_the_rank_that_polls() -> None:
    assert states_of(BARRIER, BEHIND)[0] is RankActivityState.BUSY


def test_a_collective_that_all_ranks_enqueued_and_none_completes() -> None:
    assert states_of(BARRIER, BOTH)[0] is RankActivityState.SPINS

"""Sets of steps with strides, and windows of steps without a digest."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.step_evidence import AppliedWindows
from ddpcheck.records.kinds.gradients import AppliedRecord

MODULE = ((0, 1), 0)


def steps(*numbers: int) -> ComparedSteps:
    compared = ComparedSteps()
    for number in numbers:
        compared.add(number)
    return compared


def test_a_set_of_steps_with_several_strides() -> None:
    numbers = [*range(64), *range(64, 128, 4), *range(128, 1024, 64)]
    compared = steps(*numbers)
    assert [step for step in range(1100) if step in compared] == numbers
    assert len(compared._ranges) <= 4


def test_steps_may_repeat_and_come_out_of_order() -> None:
    compared = steps(5, 6, 6, 7, 3, 5)
    assert [step for step in range(10) if step in compared] == [3, 5, 6, 7]


def test_the_last_step_before() -> None:
    compared = steps(0, 1, 2, 16, 32, 48)
    assert [compared.last_before(step) for step in (0, 2, 16, 33, 100)] == [None, 1, 2, 32, 48]


def test_whether_every_step_is_covered() -> None:
    compared = steps(*range(10), 20)
    assert compared.covers(3, 9)
    assert not compared.covers(9, 10)
    assert not compared.covers(0, 10**9)


def test_irregular_steps_are_bounded() -> None:
    compared = steps(*(number * number for number in range(5000)))
    assert len(compared._ranges) <= 1024


def window(step: int, last: str = "synced", root: str = "", synced: int = 1) -> AppliedRecord:
    return AppliedRecord(step=step, root=root, last=last, synced=synced)


def test_windows_are_bounded_and_keep_those_without_a_reduction() -> None:
    windows = AppliedWindows()
    for step in range(500):
        windows.add(MODULE, 0, window(step, "unsynced" if step == 3 else "synced"))
    kept = [step for step, _ in windows.between(MODULE, 0, -1, 500)]
    assert len(kept) == 256
    assert (kept[0], kept[-1]) == (3, 499)
    windows.forget(MODULE, 499, 1)
    assert windows.between(MODULE, 0, 498, 500)
    windows.forget(MODULE, 499, 0)
    assert not windows.between(MODULE, 0, -1, 500)


def test_a_rank_without_a_change_has_its_window_from_before() -> None:
    windows = AppliedWindows()
    windows.add(MODULE, 0, window(63, root="abc", synced=2))
    windows.add(MODULE, 0, window(80, root="def"))
    windows.add(MODULE, 1, window(70, "unsynced"))
    ((step, records),) = windows.between(MODULE, 0, 64, 80)
    assert step == 70
    assert {rank: (record.step, record.root, record.synced) for rank, record in records.items()} == {
        0: (70, "", 2),
        1: (70, "", 1),
    }

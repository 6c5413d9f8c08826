"""Values are buffered until all ranks have reported."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.agreement import PendingValues

GROUP = (0, 1, 2)


def test_complete_once_all_ranks_have_reported() -> None:
    pending: PendingValues[str, int] = PendingValues()
    assert [pending.add("a", GROUP, rank, rank * 10) for rank in (2, 0, 0, 1)] == [False, False, False, True]
    assert pending.take("a") == {0: 0, 1: 10, 2: 20}
    assert len(pending) == 0


def test_ranks_that_ended_are_not_waited_for() -> None:
    pending: PendingValues[str, int] = PendingValues()
    pending.add("a", GROUP, 0, 1)
    pending.add("b", GROUP, 0, 1)
    pending.add("b", GROUP, 1, 1)
    assert pending.end_rank(2) == ["b"]
    assert pending.end_rank(2) == []
    assert pending.end_rank(1) == ["a"]
    # Nor for later keys.
    assert pending.add("c", GROUP, 0, 1)
    assert pending.active({0, 1, 2}) == {0}


def test_values_of_a_rank_that_ended_are_kept() -> None:
    pending: PendingValues[str, int] = PendingValues()
    pending.end_rank(2)
    pending.add("a", GROUP, 2, 5)
    pending.add("a", GROUP, 0, 5)
    assert pending.add("a", GROUP, 1, 5)
    assert set(pending.take("a")) == {0, 1, 2}


def test_the_oldest_key_is_the_first_that_was_reported() -> None:
    pending: PendingValues[str, int] = PendingValues()
    for key in "cab":
        pending.add(key, GROUP, 0, 1)
    assert pending.oldest() == "c"
    assert list(pending) == ["c", "a", "b"]

"""Who has spoken and who is missing."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.pending import PendingValues

GROUP = (0, 1, 2)


def test_complete_once_all_have_spoken() -> None:
    calls: PendingValues[str, int] = PendingValues()
    assert [calls.add("a", GROUP, rank, rank * 10) for rank in (2, 0, 0, 1)] == [False, False, False, True]
    assert calls.take("a") == {0: 0, 1: 10, 2: 20}
    assert len(calls) == 0


def test_those_that_are_gone_are_not_waited_for() -> None:
    calls: PendingValues[str, int] = PendingValues()
    calls.add("a", GROUP, 0, 1)
    calls.add("b", GROUP, 0, 1)
    calls.add("b", GROUP, 1, 1)
    assert calls.end_rank(2) == ["b"]
    assert calls.end_rank(2) == []
    assert calls.end_rank(1) == ["a"]
    # Nor in what comes later.
    assert calls.add("c", GROUP, 0, 1)
    assert calls.active({0, 1, 2}) == {0}


def test_one_that_is_gone_may_still_have_spoken() -> None:
    calls: PendingValues[str, int] = PendingValues()
    calls.end_rank(2)
    calls.add("a", GROUP, 2, 5)
    calls.add("a", GROUP, 0, 5)
    assert calls.add("a", GROUP, 1, 5)
    assert set(calls.take("a")) == {0, 1, 2}


def test_the_oldest_is_the_first_that_was_spoken_of() -> None:
    calls: PendingValues[str, int] = PendingValues()
    for key in "cab":
        calls.add(key, GROUP, 0, 1)
    assert calls.oldest() == "c"
    assert list(calls) == ["c", "a", "b"]

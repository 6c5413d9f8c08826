"""The guard: nothing of ours may reach the user's program, and nothing of theirs be held back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddpcheck.guard import Guard

Fault = tuple[str, str, str, str]


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.fixture
def faults(guard: Guard) -> list[Fault]:
    said: list[Fault] = []
    guard.report_to(lambda *fault: said.append(fault))
    return said


def fail(*_: object) -> None:
    raise ValueError("broken")


def test_results_and_arguments_pass(guard: Guard, faults: list[Fault]) -> None:
    protected = guard.protect("p", "add", lambda a, b=0: a + b)
    assert protected(2, b=3) == 5
    assert faults == []


def test_an_exception_switches_the_probe_off_and_is_written_down_once(
    guard: Guard, faults: list[Fault]
) -> None:
    calls: list[str] = []
    broken = guard.protect("p", "look", fail)
    sibling = guard.protect("p", "other", lambda: calls.append("sibling"))
    stranger = guard.protect("q", "other", lambda: calls.append("stranger"))
    assert broken() is None
    assert broken() is None
    sibling()
    stranger()
    assert calls == ["stranger"]
    assert guard.off == {"p"}
    ((probe, entry, error, where),) = faults
    assert (probe, entry, error) == ("p", "look", "ValueError: broken")
    assert where.startswith(__file__)


def test_a_long_message_is_cut(guard: Guard, faults: list[Fault]) -> None:
    def wordy() -> None:
        raise ValueError("x" * 10_000)

    guard.protect("p", "look", wordy)()
    assert len(faults[0][2]) == 500


@pytest.mark.parametrize("theirs", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_the_users_passes(guard: Guard, faults: list[Fault], theirs: type[BaseException]) -> None:
    def interrupted() -> None:
        raise theirs

    protected = guard.protect("p", "look", interrupted)
    with pytest.raises(theirs):
        protected()
    assert faults == []
    assert guard.off == set()


def test_a_fault_before_anyone_listens_is_told_later(guard: Guard) -> None:
    guard.protect("p", "look", fail)()
    said: list[Fault] = []
    guard.report_to(lambda *fault: said.append(fault))
    assert [fault[:3] for fault in said] == [("p", "look", "ValueError: broken")]
    again: list[Fault] = []
    guard.report_to(lambda *fault: again.append(fault))
    assert again == []


def test_a_reporter_that_fails_itself_costs_nothing(guard: Guard) -> None:
    guard.report_to(fail)
    guard.protect("p", "look", fail)()
    said: list[Fault] = []
    guard.report_to(lambda *fault: said.append(fault))
    assert [fault[0] for fault in said] == ["p"]


def test_only_the_latest_reporter_is_told(guard: Guard, faults: list[Fault]) -> None:
    latest: list[Fault] = []
    guard.report_to(lambda *fault: latest.append(fault))
    guard.protect("p", "look", fail)()
    assert faults == []
    assert len(latest) == 1


def test_an_entry_point_can_be_broken_from_outside(guard: Guard, faults: list[Fault]) -> None:
    protected = guard.protect("p", "look", lambda: 1)
    guard.entry_points["p.look"].body = fail
    assert protected() is None
    assert [fault[1] for fault in faults] == ["look"]


def test_what_begins_early_waits_for_a_rank() -> None:
    guard, told, stranded = Guard(), [], []
    guard.early.add("startup")
    guard.last_resort = lambda *fault: stranded.append(fault)
    for probe in ("startup", "agent"):
        guard.protect(probe, "begin", lambda: [][1])()
    assert [fault[0] for fault in stranded] == ["agent"]
    guard.report_to(lambda *fault: told.append(fault))
    assert [fault[0] for fault in told] == ["startup"]


def test_every_entry_point_runs_in_the_surroundings_that_were_asked_for(
    guard: Guard, faults: list[Fault]
) -> None:
    inside: list[str] = []

    @contextmanager
    def surroundings() -> Iterator[None]:
        inside.append("in")
        try:
            yield
        finally:
            inside.append("out")

    early = guard.protect("p", "look", lambda: inside.append("look"))
    broken = guard.protect("q", "look", fail)
    guard.surroundings = surroundings
    early()
    broken()
    assert inside == ["in", "look", "out", "in", "out"]
    assert len(faults) == 1

"""The guard: exceptions of ddpcheck never reach the user's program, and its own exceptions always do."""

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
    reported: list[Fault] = []
    guard.report_to(lambda *fault: reported.append(fault))
    return reported


def fail(*_: object) -> None:
    raise ValueError("broken")


def test_results_and_arguments_are_passed_on(guard: Guard, faults: list[Fault]) -> None:
    protected = guard.protect("p", "add", lambda a, b=0: a + b)
    assert protected(2, b=3) == 5
    assert faults == []


def test_exception_switches_off_the_probe_and_is_reported_once(guard: Guard, faults: list[Fault]) -> None:
    calls: list[str] = []
    broken = guard.protect("p", "read", fail)
    sibling = guard.protect("p", "other", lambda: calls.append("sibling"))
    other_probe = guard.protect("q", "other", lambda: calls.append("other_probe"))
    assert broken() is None
    assert broken() is None
    sibling()
    other_probe()
    assert calls == ["other_probe"]
    assert guard.off == {"p"}
    ((probe, entry, error, where),) = faults
    assert (probe, entry, error) == ("p", "read", "ValueError: broken")
    assert where.startswith(__file__)


def test_long_message_is_truncated(guard: Guard, faults: list[Fault]) -> None:
    def fail_with_long_message() -> None:
        raise ValueError("x" * 10_000)

    guard.protect("p", "read", fail_with_long_message)()
    assert len(faults[0][2]) == 500


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exceptions_of_the_user_are_not_caught(
    guard: Guard, faults: list[Fault], exception: type[BaseException]
) -> None:
    def interrupted() -> None:
        raise exception

    protected = guard.protect("p", "read", interrupted)
    with pytest.raises(exception):
        protected()
    assert faults == []
    assert guard.off == set()


def test_fault_without_a_reporter_is_reported_later(guard: Guard) -> None:
    guard.protect("p", "read", fail)()
    reported: list[Fault] = []
    guard.report_to(lambda *fault: reported.append(fault))
    assert [fault[:3] for fault in reported] == [("p", "read", "ValueError: broken")]
    repeated: list[Fault] = []
    guard.report_to(lambda *fault: repeated.append(fault))
    assert repeated == []


def test_failing_reporter_has_no_effect(guard: Guard) -> None:
    guard.report_to(fail)
    guard.protect("p", "read", fail)()
    reported: list[Fault] = []
    guard.report_to(lambda *fault: reported.append(fault))
    assert [fault[0] for fault in reported] == ["p"]


def test_only_the_latest_reporter_is_called(guard: Guard, faults: list[Fault]) -> None:
    latest: list[Fault] = []
    guard.report_to(lambda *fault: latest.append(fault))
    guard.protect("p", "read", fail)()
    assert faults == []
    assert len(latest) == 1


def test_body_of_an_entry_point_can_be_replaced(guard: Guard, faults: list[Fault]) -> None:
    protected = guard.protect("p", "read", lambda: 1)
    guard.entry_points["p.read"].body = fail
    assert protected() is None
    assert [fault[1] for fault in faults] == ["read"]


def test_faults_of_early_probes_are_kept_until_there_is_a_reporter() -> None:
    guard, reported, last_resort = Guard(), [], []
    guard.early.add("startup")
    guard.last_resort = lambda *fault: last_resort.append(fault)
    for probe in ("startup", "agent"):
        guard.protect(probe, "begin", lambda: [][1])()
    assert [fault[0] for fault in last_resort] == ["agent"]
    guard.report_to(lambda *fault: reported.append(fault))
    assert [fault[0] for fault in reported] == ["startup"]


def test_entry_points_run_in_the_context_manager(guard: Guard, faults: list[Fault]) -> None:
    inside: list[str] = []

    @contextmanager
    def surroundings() -> Iterator[None]:
        inside.append("in")
        try:
            yield
        finally:
            inside.append("out")

    early = guard.protect("p", "read", lambda: inside.append("read"))
    broken = guard.protect("q", "read", fail)
    guard.surroundings = surroundings
    early()
    broken()
    assert inside == ["in", "read", "out", "in", "out"]
    assert len(faults) == 1

"""What a job captures into graphs is counted, and ddpcheck touches no device meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.agent import graph_tracker
from ddpcheck.agent.graph_tracker import GraphTracker
from ddpcheck.guard import Guard
from ddpcheck.records.kinds.rank import GraphRecord
from ddpcheck.records.registry import Record


class FakeGraph:
    replays = 0

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.setattr(graph_tracker, "graph_classes", lambda: [FakeGraph])
    return []


def capture(tracker: GraphTracker, *names: str) -> FakeGraph:
    graph = FakeGraph()
    for name in names:
        tracker.skipped(name)
    graph.capture_end()
    return graph


def test_a_captured_step_and_its_replays(records: list[Record]) -> None:
    tracker = GraphTracker(records.append)
    assert not tracker.forwards_captured
    whole = ("before_forward", "after_forward", "backward_called", "before_step", "after_step")
    graph = capture(tracker, *whole)
    assert records == [GraphRecord(captures=1, forwards=1, backwards=1, steps=1)]
    assert tracker.forwards_captured
    before = FakeGraph.replays
    for _ in range(5):
        graph.replay()
    tracker.close()
    assert FakeGraph.replays == before + 5
    assert records[-1] == GraphRecord(1, 1, 1, 1, replays=5, replayed_backwards=5, replayed_steps=5)


def test_a_graph_without_a_step_is_not_counted(records: list[Record]) -> None:
    tracker = GraphTracker(records.append)
    capture(tracker, "before_forward")
    capture(tracker).replay()
    tracker.close()
    assert records == [GraphRecord(captures=1, forwards=1)]


def test_a_job_that_captures_nothing_is_not_patched(records: list[Record]) -> None:
    original = FakeGraph.replay
    tracker = GraphTracker(records.append)
    tracker.skipped("batch_requested")
    assert FakeGraph.replay is original
    capture(tracker, "before_step")
    assert FakeGraph.replay is not original
    tracker.close()
    assert FakeGraph.replay is original


def test_a_capture_whose_end_is_not_seen_is_counted_at_the_end(records: list[Record]) -> None:
    tracker = GraphTracker(records.append)
    tracker.skipped("before_step")
    tracker.close()
    assert records == [GraphRecord(captures=1, steps=1)]


def test_the_guard_calls_nothing_while_a_graph_is_captured() -> None:
    guard, calls, skipped = Guard(), [], []
    guard.skipped = skipped.append
    step = guard.protect("agent", "before_step", lambda: calls.append("step"))
    close = guard.protect("exit", "close", lambda: calls.append("close"), while_capturing=True)

    def surroundings() -> Any:
        raise AssertionError("entered during a capture")

    guard.capture_checks = [lambda: True]
    before, guard.surroundings = guard.surroundings, surroundings
    step()
    assert (calls, skipped, guard.off) == ([], ["before_step"], set())
    guard.surroundings = before
    close()
    guard.capture_checks = ()
    step()
    assert calls == ["close", "step"]

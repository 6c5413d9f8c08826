"""What events cost: the total and the checks of the budget at each step, other handlers estimated from some steps."""

from __future__ import annotations

import pytest

from ddpcheck.agent import rank_context
from ddpcheck.agent.rank_context import TIMED_EVERY, TIMED_STEPS, RankContext
from ddpcheck.guard import EntryPoint
from ddpcheck.probes.probe import Probe


class Clock:
    """Advances when a handler runs, and counts how often it is read."""

    def __init__(self) -> None:
        self.now = 1
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return self.now

    def handler(self, name: str, cost: int) -> EntryPoint:
        def body() -> None:
            self.now += cost

        return EntryPoint(name, name, body)


def test_times_of_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rank_context, "perf_counter_ns", clock)
    budgeted, other = clock.handler("gradients", 30), clock.handler("loss", 7)
    budgeted.always_timed = True
    # Without a process group: only what counts events.
    context = RankContext.__new__(RankContext)
    context.own_ns = context.entered = context._steps = 0
    context._weight = 1
    context._handlers = {Probe.before_exit: [budgeted, other]}
    steps = TIMED_STEPS + 10 * TIMED_EVERY
    reads = []
    for _ in range(steps):
        before = clock.reads
        context.emit(Probe.before_exit)
        reads.append(clock.reads - before)
        context.step_done()
    assert context.own_ns == steps * 37
    assert budgeted.ns == steps * 30
    assert other.ns == steps * 7
    # Its clock is not read at most steps.
    assert set(reads[:TIMED_STEPS]) == {6}
    assert reads[TIMED_STEPS:].count(4) == 10 * (TIMED_EVERY - 1)

"""Cost of step timing in the training thread: the events of one step through the guard, in microseconds.

python benchmarks/step_timing_cost.py
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
from ddpcheck.config import Config
from ddpcheck.guard import GUARD
from ddpcheck.patches import around_next
from ddpcheck.probes.probe import EVENTS, Probe
from ddpcheck.probes.step_timing import StepTimingProbe
from ddpcheck.records.registry import Record, to_line

# Rounds are short, so that most pass without another program in between.
STEPS = 20
ROUNDS = 500
PARAMETERS = 100
MOST_MICROSECONDS = 50.0


class Alone(RankContext):
    """A session that has the clocks for its only probe, and turns records into lines without a file."""

    def __init__(self) -> None:
        self.config = Config(run_dir="", run_id="")
        self.own_ns = 0
        self._handlers = {event: [] for event in EVENTS}

    def enlist(self) -> None:
        self._register(StepTimingProbe(self))

    def write(self, record: Record) -> None:
        to_line(record)


def one_step(session: Alone, take: Any, tracked: Any, optimizer: TrackedOptimizer, parameters: int) -> None:
    emit = session.emit
    take(None)
    emit(Probe.before_forward, tracked)
    emit(Probe.forward_inputs, tracked, (), {})
    emit(Probe.buffers_synced, tracked)
    emit(Probe.after_forward, tracked)
    emit(Probe.backward_called)
    emit(Probe.backward_begun, tracked)
    for place in range(parameters):
        emit(Probe.gradient_ready, tracked, place, None)
    emit(Probe.gradients_computed, tracked)
    emit(Probe.gradients_reduced, tracked)
    emit(Probe.backward_returned)
    emit(Probe.before_step, optimizer)
    emit(Probe.after_step, optimizer)
    optimizer.steps += 1


def measure(parameters: int) -> float:
    """Microseconds a step, the median over the rounds."""
    session = Alone()
    session.enlist()
    events = (Probe.batch_requested, Probe.batch_received, Probe.loader_exhausted)
    observers = [
        GUARD.protect("agent", event.__name__, lambda iterator, event=event: session.emit(event, iterator))
        for event in events
    ]
    take = around_next(lambda iterator: None, *observers)
    optimizer = TrackedOptimizer(0, "SGD", lambda: None, ())  # type: ignore[arg-type]
    tracked: Any = type("Watched", (), {"ddp": lambda self: None})()
    rounds = []
    for _ in range(ROUNDS):
        # Processor time: what other programs take does not count.
        began = time.thread_time()
        for _ in range(STEPS):
            one_step(session, take, tracked, optimizer, parameters)
        rounds.append((time.thread_time() - began) / STEPS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    torch.set_num_threads(1)
    step, full = measure(0), measure(PARAMETERS)
    each = (full - step) / PARAMETERS
    print(f"{step:.1f} us a step and {each:.2f} us for each parameter")
    sys.exit(0 if step <= MOST_MICROSECONDS else 1)


if __name__ == "__main__":
    main()

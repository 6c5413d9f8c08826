"""Cost of step timing in the training thread: the events of one step through the guard, in microseconds.

python benchmarks/step_timing_cost.py
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from ddpcheck.agent.guard import GUARD
from ddpcheck.agent.rank_context import RankContext
from ddpcheck.agent.tracked_loader import timed
from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
from ddpcheck.config import Config
from ddpcheck.probes.probe import MOMENTS
from ddpcheck.probes.step_timing import StepTimingProbe
from ddpcheck.records.schema import Record, to_line

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
        self._moments = {moment: [] for moment in MOMENTS}

    def enlist(self) -> None:
        self._enlist(StepTimingProbe(self))

    def write(self, record: Record) -> None:
        to_line(record)


def one_step(session: Alone, take: Any, watched: Any, optimizer: TrackedOptimizer, parameters: int) -> None:
    tell = session.tell
    take(None)
    tell("forward", watched)
    tell("inputs", watched, (), {})
    tell("buffers_synced", watched)
    tell("forward_done", watched)
    tell("backward_called")
    tell("backward_begun", watched)
    for place in range(parameters):
        tell("gradient_ready", watched, place, None)
    tell("computed", watched)
    tell("reduced", watched)
    tell("backward_returned")
    tell("before_step", optimizer)
    tell("after_step", optimizer)
    optimizer.steps += 1


def measure(parameters: int) -> float:
    """Microseconds a step, the median over the rounds."""
    session = Alone()
    session.enlist()
    relay = {
        m: GUARD.protect("agent", m, lambda i, m=m: session.tell(m, i)) for m in ("asking", "got", "ran_out")
    }
    take = timed(lambda iterator: None, relay["asking"], relay["got"], relay["ran_out"])
    optimizer = TrackedOptimizer(0, "SGD", lambda: None, ())  # type: ignore[arg-type]
    watched: Any = type("Watched", (), {"ddp": lambda self: None})()
    rounds = []
    for _ in range(ROUNDS):
        # Processor time: what other programs take does not count.
        began = time.thread_time()
        for _ in range(STEPS):
            one_step(session, take, watched, optimizer, parameters)
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

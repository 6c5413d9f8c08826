"""Cost of reading the loss in the training thread, per step on the CPU, in microseconds.

python benchmarks/loss_cost.py
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
from ddpcheck.probes.loss import LossProbe
from ddpcheck.probes.probe import EVENTS, Probe
from ddpcheck.records.registry import Record, to_line

# Rounds are short, so that most pass without another program in between.
STEPS = 64
ROUNDS = 500
MOST_MICROSECONDS = 25.0


class Alone(RankContext):
    """A session with one probe or none, which turns records into lines without a file."""

    def __init__(self, *probes: Any) -> None:
        self.config = Config(run_dir="", run_id="")
        self.own_ns = 0
        self.bytes = 0
        self._handlers = {event: [] for event in EVENTS}
        for probe in probes:
            self._register(probe(self))

    def write(self, record: Record) -> None:
        self.bytes += len(to_line(record))


def one_step(session: Alone, optimizer: TrackedOptimizer, loss: torch.Tensor) -> None:
    session.emit(Probe.before_forward, None)
    session.emit(Probe.backward_called, loss)
    session.emit(Probe.backward_returned)
    session.emit(Probe.before_step, optimizer)
    session.emit(Probe.after_step, optimizer)
    optimizer.steps += 1


def measure(session: Alone) -> float:
    """Microseconds a step, the median over the rounds."""
    optimizer = TrackedOptimizer(0, "SGD", lambda: None, ())  # type: ignore[arg-type]
    losses = [torch.rand((), requires_grad=True) * 3 for _ in range(STEPS)]
    rounds = []
    for _ in range(ROUNDS):
        # Processor time: what other programs take does not count.
        began = time.thread_time()
        for loss in losses:
            one_step(session, optimizer, loss)
        rounds.append((time.thread_time() - began) / STEPS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    torch.set_num_threads(1)
    watching = Alone(LossProbe)
    cost = measure(watching) - measure(Alone())
    print(f"{cost:.1f} us and {watching.bytes / STEPS / ROUNDS:.1f} bytes a step")
    sys.exit(0 if cost <= MOST_MICROSECONDS else 1)


if __name__ == "__main__":
    main()

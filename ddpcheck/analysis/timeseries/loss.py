"""One rank's loss over the steps of one optimizer; of a long job every so-manieth step is kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.kinds.optimizers import LossRecord

MOST_STEPS = 1024
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass
class LossSeries:
    """Steps and values, of one length. The same steps are kept on every rank."""

    every: int = 1
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, record: LossRecord) -> None:
        for number, raw in enumerate(record.values):
            step, value = record.step + number, _value(raw)
            # What came first stays.
            if value is None or step % self.every or (self.steps and step <= self.steps[-1]):
                continue
            self.steps.append(step)
            self.values.append(value)
        while len(self.steps) > MOST_STEPS:
            self._thin_out()

    def _thin_out(self) -> None:
        self.every *= 2
        kept = [place for place, step in enumerate(self.steps) if step % self.every == 0]
        self.steps = array("q", (self.steps[place] for place in kept))
        self.values = array("d", (self.values[place] for place in kept))


def _value(raw: Any) -> float | None:
    """None where the rank could not tell, or the record is damaged."""
    if type(raw) in (int, float) or raw in _NOT_FINITE:
        return float(raw)
    return None

"""The loss of one rank over the steps of one optimizer."""

from __future__ import annotations

from array import array
from typing import Any

from ddpcheck.analysis.timeseries.series import BoundedSeries
from ddpcheck.records.kinds.optimizers import LossRecord

MOST_STEPS = 1024
_NOT_FINITE = ("nan", "inf", "-inf")


class LossSeries(BoundedSeries):
    """Losses by step; the same steps are kept on every rank."""

    def __init__(self) -> None:
        super().__init__(MOST_STEPS, {"value": "d"})

    @property
    def values(self) -> array[float]:
        values: array[float] = self.columns["value"]
        return values

    def add(self, record: LossRecord) -> None:
        for number, raw in enumerate(record.values):
            value = _value(raw)
            if value is not None:
                self.add_row(record.step + number, {"value": value})


def _value(raw: Any) -> float | None:
    """None if the rank could not read the loss, or the record is damaged."""
    if type(raw) in (int, float) or raw in _NOT_FINITE:
        return float(raw)
    return None

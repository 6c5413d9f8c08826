"""Samples as lists for drawing, and totals as rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from ddpcheck.analysis.hardware.sample import Gpu, Sample

Rates = list[tuple[int, int]]


def series_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """For drawing: gauges at each time, and bytes a second since the time before."""
    network = rates_of(samples, partial(_over_interfaces, False))
    loopback = rates_of(samples, partial(_over_interfaces, True))
    gpus = max((len(sample.gpus) for sample in samples), default=0)
    return {
        "time": [sample.time for sample in samples],
        "cpu": [sample.cpu for sample in samples],
        "memory": [sample.memory for sample in samples],
        "network": {"received": [row[0] for row in network], "sent": [row[1] for row in network]},
        "loopback": {"received": [row[0] for row in loopback], "sent": [row[1] for row in loopback]},
        "gpus": [_gpu_series(samples, index) for index in range(gpus)],
    }


def _gpu_series(samples: Sequence[Sample], index: int) -> dict[str, Any]:
    gauges = {
        name: [getattr(_gpu(sample, index), name) for sample in samples]
        for name in ("memory", "busy", "clock", "temperature", "power")
    }
    rates = {
        kind: [row[1] for row in rates_of(samples, partial(_both_ways, index, kind))]
        for kind in ("nvlink", "pcie")
    }
    return {**gauges, **{f"{kind}_sent": row for kind, row in rates.items()}}


def _both_ways(index: int, kind: str, sample: Sample) -> tuple[int, ...]:
    moved: tuple[int, int] | None = getattr(_gpu(sample, index), kind)
    return () if moved is None else (moved[1], moved[0])


def _gpu(sample: Sample, index: int) -> Gpu:
    """A driver that was silent tells nothing of any GPU."""
    return sample.gpus[index] if index < len(sample.gpus) else Gpu()


def _over_interfaces(loopback: bool, sample: Sample) -> tuple[int, ...]:
    rows = [row for name, row in sample.interfaces.items() if (name == "lo") is loopback]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def rates_of(samples: Sequence[Sample], totals: Callable[[Sample], tuple[int, ...]]) -> Rates:
    """Bytes a second, received and sent; 0 for the first."""
    found = [(0, 0)] if samples else []
    for before, after in pairwise(samples):
        old, new = totals(before), totals(after)
        seconds = after.time - before.time
        if len(old) == len(new) == 2 and seconds > 0:
            found.append((_rate(old[0], new[0], seconds), _rate(old[1], new[1], seconds)))
        else:
            found.append((0, 0))
    return found


def _rate(before: int, after: int, seconds: float) -> int:
    return round(max(0, after - before) / seconds)

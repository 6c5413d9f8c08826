"""TensorBoard's custom scalars: related series of all ranks in one chart."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

from ddpcheck.analysis.timeseries.model import SeriesKind
from ddpcheck.reports.tensorboard.tags import SHOWN

_CHARTS: tuple[tuple[str, tuple[tuple[str, tuple[SeriesKind, ...]], ...]], ...] = (
    (
        "Do the replicas agree?",
        (
            ("Each rank with the majority, and all ranks: 1 agree, 0 differ", (SeriesKind.AGREEMENT,)),
            ("Parameters that differ", (SeriesKind.DIFFERING,)),
            (
                "Gradient norms: local, and after AllReduce",
                (SeriesKind.NORM_BEFORE, SeriesKind.NORM_AFTER),
            ),
            ("AllReduce error / rounding bound (above 1: wrong)", (SeriesKind.OFF_MEAN,)),
            ("Loss of each rank, and the mean", (SeriesKind.LOSS,)),
        ),
    ),
    (
        "Step time",
        (
            ("Step, ms", (SeriesKind.STEP,)),
            ("Waiting for data, ms", (SeriesKind.DATA,)),
            ("Forward, ms", (SeriesKind.FORWARD,)),
            ("Backward, ms", (SeriesKind.BACKWARD,)),
            ("Optimizer, ms", (SeriesKind.OPTIMIZER,)),
            ("Waiting for communication, ms", (SeriesKind.WAIT,)),
            (
                "Exposed communication, and waiting for stragglers, ms",
                (SeriesKind.EXPOSED, SeriesKind.FOR_OTHERS),
            ),
        ),
    ),
    (
        "Overlap in the profiled steps",
        (
            ("Overlap, %", (SeriesKind.OVERLAP,)),
            (
                "Exposed communication, ms",
                (SeriesKind.PROFILED_EXPOSED, SeriesKind.PROFILED_TRANSFER, SeriesKind.PROFILED_WAIT),
            ),
        ),
    ),
    (
        "Memory",
        (
            ("After each step, MiB", (SeriesKind.MEMORY,)),
            ("Peak, MiB", (SeriesKind.MEMORY_HIGH,)),
            ("GPU, MiB", (SeriesKind.GPU_MEMORY,)),
        ),
    ),
    (
        "Links",
        (
            ("Network, MB/s", (SeriesKind.NETWORK_SENT, SeriesKind.NETWORK_RECEIVED)),
            ("Loopback, MB/s", (SeriesKind.LOOPBACK_SENT, SeriesKind.LOOPBACK_RECEIVED)),
            ("InfiniBand, MB/s", (SeriesKind.INFINIBAND_SENT, SeriesKind.INFINIBAND_RECEIVED)),
            ("NVLink, MB/s", (SeriesKind.NVLINK_SENT, SeriesKind.NVLINK_RECEIVED)),
            ("PCIe, MB/s", (SeriesKind.PCIE_SENT, SeriesKind.PCIE_RECEIVED)),
        ),
    ),
)


def layout_of(figures: Collection[SeriesKind]) -> Any:
    """Charts of the series that this job has."""
    categories = [
        Category(title=title, chart=[_chart(*chart) for chart in charts if set(chart[1]) & set(figures)])
        for title, charts in _CHARTS
    ]
    return Layout(category=[category for category in categories if category.chart])


def _chart(title: str, figures: Sequence[SeriesKind]) -> Any:
    # Matched from the beginning of a tag; a module, an optimizer or a host may follow.
    tags = [f"{re.escape(SHOWN[figure].tag)}(/.*)?$" for figure in figures]
    return Chart(title=title, multiline=MultilineChartContent(tag=tags))

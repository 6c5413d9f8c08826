"""TensorBoard's custom scalars: figures that belong together, all ranks in one chart."""

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
            ("Each rank with the majority, and all of them: 1 yes, 0 no", (SeriesKind.AGREEMENT,)),
            ("Parameters that differ", (SeriesKind.DIFFERING,)),
            (
                "Gradient norms: each rank's own, and the one after AllReduce",
                (SeriesKind.NORM_BEFORE, SeriesKind.NORM_AFTER),
            ),
            ("Mean check: error over what rounding explains (above 1: wrong)", (SeriesKind.OFF_MEAN,)),
            ("Loss of each rank, and the mean", (SeriesKind.LOSS,)),
        ),
    ),
    (
        "Where does a step's time go?",
        (
            ("Step, ms", (SeriesKind.STEP,)),
            ("Waiting for data, ms", (SeriesKind.DATA,)),
            ("Forward, ms", (SeriesKind.FORWARD,)),
            ("Backward, ms", (SeriesKind.BACKWARD,)),
            ("Optimizer, ms", (SeriesKind.OPTIMIZER,)),
            ("Waiting for communication, ms", (SeriesKind.WAIT,)),
            (
                "Of it: exposed communication, and waiting for others, ms",
                (SeriesKind.EXPOSED, SeriesKind.FOR_OTHERS),
            ),
        ),
    ),
    (
        "What do the profiled steps hide?",
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
            ("At its most, MiB", (SeriesKind.MEMORY_HIGH,)),
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
    """Charts of the figures that this job has."""
    categories = [
        Category(title=title, chart=[_chart(*chart) for chart in charts if set(chart[1]) & set(figures)])
        for title, charts in _CHARTS
    ]
    return Layout(category=[category for category in categories if category.chart])


def _chart(title: str, figures: Sequence[SeriesKind]) -> Any:
    # Matched from the beginning of a tag; what may follow it is a module, an optimizer or a host.
    tags = [f"{re.escape(SHOWN[figure].tag)}(/.*)?$" for figure in figures]
    return Chart(title=title, multiline=MultilineChartContent(tag=tags))

"""TensorBoard's custom scalars: figures that belong together, all ranks in one chart."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

from ddpcheck.analysis.timeseries.model import Figure
from ddpcheck.reports.tensorboard.tags import SHOWN

_CHARTS: tuple[tuple[str, tuple[tuple[str, tuple[Figure, ...]], ...]], ...] = (
    (
        "Do the replicas agree?",
        (
            ("Each rank with the majority, and all of them: 1 yes, 0 no", (Figure.AGREEMENT,)),
            ("Parameters that differ", (Figure.DIFFERING,)),
            (
                "Gradient norms: each rank's own, and the one after AllReduce",
                (Figure.NORM_BEFORE, Figure.NORM_AFTER),
            ),
            ("Mean check: error over what rounding explains (above 1: wrong)", (Figure.OFF_MEAN,)),
            ("Loss of each rank, and the mean", (Figure.LOSS,)),
        ),
    ),
    (
        "Where does a step's time go?",
        (
            ("Step, ms", (Figure.STEP,)),
            ("Waiting for data, ms", (Figure.DATA,)),
            ("Forward, ms", (Figure.FORWARD,)),
            ("Backward, ms", (Figure.BACKWARD,)),
            ("Optimizer, ms", (Figure.OPTIMIZER,)),
            ("Waiting for communication, ms", (Figure.WAIT,)),
            ("Of it: exposed communication, and waiting for others, ms", (Figure.EXPOSED, Figure.FOR_OTHERS)),
        ),
    ),
    (
        "What do the profiled steps hide?",
        (
            ("Overlap, %", (Figure.OVERLAP,)),
            (
                "Exposed communication, ms",
                (Figure.PROFILED_EXPOSED, Figure.PROFILED_TRANSFER, Figure.PROFILED_WAIT),
            ),
        ),
    ),
    (
        "Memory",
        (
            ("After each step, MiB", (Figure.MEMORY,)),
            ("At its most, MiB", (Figure.MEMORY_HIGH,)),
            ("GPU, MiB", (Figure.GPU_MEMORY,)),
        ),
    ),
    (
        "Links",
        (
            ("Network, MB/s", (Figure.NETWORK_SENT, Figure.NETWORK_RECEIVED)),
            ("Loopback, MB/s", (Figure.LOOPBACK_SENT, Figure.LOOPBACK_RECEIVED)),
            ("InfiniBand, MB/s", (Figure.INFINIBAND_SENT, Figure.INFINIBAND_RECEIVED)),
            ("NVLink, MB/s", (Figure.NVLINK_SENT, Figure.NVLINK_RECEIVED)),
            ("PCIe, MB/s", (Figure.PCIE_SENT, Figure.PCIE_RECEIVED)),
        ),
    ),
)


def layout_of(figures: Collection[Figure]) -> Any:
    """Charts of the figures that this job has."""
    categories = [
        Category(title=title, chart=[_chart(*chart) for chart in charts if set(chart[1]) & set(figures)])
        for title, charts in _CHARTS
    ]
    return Layout(category=[category for category in categories if category.chart])


def _chart(title: str, figures: Sequence[Figure]) -> Any:
    # Matched from the beginning of a tag; what may follow it is a module, an optimizer or a host.
    tags = [f"{re.escape(SHOWN[figure].tag)}(/.*)?$" for figure in figures]
    return Chart(title=title, multiline=MultilineChartContent(tag=tags))

"""The TensorBoard tag of each series, its unit and its description, and the charts of related series."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind

_MILLISECONDS = 1e3
_MIB = float(1 << 20)
_MB = 1e6


@dataclass(frozen=True)
class TagInfo:
    """The tag and description of a series."""

    tag: str
    about: str
    # Values are divided by this to get the unit in the tag.
    unit: float = 1.0


def tag_of(line: NamedSeries) -> str:
    """The tag, with the module, optimizer or host appended where there are several."""
    tag = SHOWN[line.figure].tag
    return f"{tag}/{safe_name(line.of)}" if line.of else tag


def safe_name(name: str) -> str:
    """A name of the job as part of a tag; slashes would create groups."""
    return re.sub(r"[^\w.-]", "_", name)


def _rate(tag: str, way: str, what: str) -> TagInfo:
    return TagInfo(
        f"{tag}/{way}_MB_per_s", f"{what}, {way}, in 1e6 bytes per second since the previous sample.", _MB
    )


def _phase(name: str, about: str) -> TagInfo:
    return TagInfo(f"step_time/{name}_ms", about, _MILLISECONDS)


SHOWN: dict[SeriesKind, TagInfo] = {
    SeriesKind.AGREEMENT: TagInfo(
        "agreement/agree",
        "1: parameters are bit-identical on all ranks after this step. In a rank's run: identical to the majority.",
    ),
    SeriesKind.DIFFERING: TagInfo(
        "agreement/parameters_that_differ",
        "Number of parameters that differ between ranks after this step.",
    ),
    SeriesKind.NORM_BEFORE: TagInfo(
        "gradients/norm_before_allreduce",
        "Norm of this rank's local gradients, estimated from sketches (accurate to 20 %).",
    ),
    SeriesKind.NORM_AFTER: TagInfo(
        "gradients/norm_after_allreduce",
        "Norm of the gradients after AllReduce, estimated from sketches of all ranks (accurate to 20 %).",
    ),
    SeriesKind.OFF_MEAN: TagInfo(
        "gradients/mean_check_error",
        "AllReduce error / rounding bound: difference between the reduced gradients and the mean of the local ones. "
        "Above 1: wrong.",
    ),
    SeriesKind.LOSS: TagInfo(
        "loss/loss",
        "Values that backward() was called on, summed over a step; in the run `job`, the mean over ranks.",
    ),
    SeriesKind.STEP: _phase("step", "From the end of one optimizer step to the end of the next."),
    SeriesKind.DATA: _phase("data", "Waiting for the data loader."),
    SeriesKind.FORWARD: _phase("forward", "Forward through DDP's wrapper."),
    SeriesKind.BACKWARD: _phase("backward", "Backward, without waiting for communication."),
    SeriesKind.OPTIMIZER: _phase("optimizer", "The optimizer's step."),
    SeriesKind.OTHER: _phase("other", "Time outside of the other phases."),
    SeriesKind.WAIT: _phase("wait", "Waiting for communication, including waiting for stragglers."),
    SeriesKind.WATCHING: _phase("ddpcheck", "Overhead of ddpcheck, in addition to the step."),
    SeriesKind.EXPOSED: TagInfo(
        "communication/exposed_ms",
        "Exposed communication: the shortest wait of any rank in this step, not hidden behind the backward.",
        _MILLISECONDS,
    ),
    SeriesKind.FOR_OTHERS: TagInfo(
        "communication/waiting_for_others_ms",
        "Time this rank waited for stragglers: its wait minus that of the last rank to arrive.",
        _MILLISECONDS,
    ),
    SeriesKind.MEMORY: TagInfo(
        "memory/after_step_MiB",
        "Memory of this rank after the step: allocated by torch on its device, or resident in the process.",
        _MIB,
    ),
    SeriesKind.MEMORY_HIGH: TagInfo(
        "memory/high_MiB",
        "Peak memory in the step on a device; otherwise memory at the start of the backward.",
        _MIB,
    ),
    SeriesKind.OVERLAP: TagInfo(
        "profiled/overlap_percent",
        "Share of the time of collectives in which compute ran too, from ddpcheck's analysis of the trace.",
    ),
    SeriesKind.PROFILED_EXPOSED: TagInfo(
        "profiled/exposed_ms", "Communication without concurrent compute.", _MILLISECONDS
    ),
    SeriesKind.PROFILED_TRANSFER: TagInfo(
        "profiled/exposed_transfer_ms", "Exposed transfers; mean over ranks.", _MILLISECONDS
    ),
    SeriesKind.PROFILED_WAIT: TagInfo(
        "profiled/exposed_wait_ms",
        "Exposed waiting for the last rank; mean over ranks.",
        _MILLISECONDS,
    ),
    SeriesKind.CPU: TagInfo("node/cpu_percent", "CPU utilisation of the node."),
    SeriesKind.NETWORK_SENT: _rate("network", "sent", "All interfaces of the node except loopback"),
    SeriesKind.NETWORK_RECEIVED: _rate("network", "received", "All interfaces of the node except loopback"),
    SeriesKind.LOOPBACK_SENT: _rate(
        "loopback", "sent", "Loopback interface of the node, which gloo uses within a node"
    ),
    SeriesKind.LOOPBACK_RECEIVED: _rate(
        "loopback", "received", "Loopback interface of the node, which gloo uses within a node"
    ),
    SeriesKind.INFINIBAND_SENT: _rate("infiniband", "sent", "All InfiniBand ports of the node"),
    SeriesKind.INFINIBAND_RECEIVED: _rate("infiniband", "received", "All InfiniBand ports of the node"),
    SeriesKind.NVLINK_SENT: _rate("nvlink", "sent", "All NVLinks of this rank's GPU"),
    SeriesKind.NVLINK_RECEIVED: _rate("nvlink", "received", "All NVLinks of this rank's GPU"),
    SeriesKind.PCIE_SENT: _rate("pcie", "sent", "PCIe of this rank's GPU"),
    SeriesKind.PCIE_RECEIVED: _rate("pcie", "received", "PCIe of this rank's GPU"),
    SeriesKind.GPU_BUSY: TagInfo("gpu/busy_percent", "Utilisation of this rank's GPU."),
    SeriesKind.GPU_MEMORY: TagInfo(
        "gpu/memory_MiB", "Memory of this rank's GPU that all processes use.", _MIB
    ),
}

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

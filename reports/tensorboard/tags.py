"""The tag under which TensorBoard shows each figure, its unit, and what it means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind

_MILLISECONDS = 1e3
_MIB = float(1 << 20)
_MB = 1e6


@dataclass(frozen=True)
class TagInfo:
    """How a figure is shown."""

    tag: str
    about: str
    # What a figure is divided by to come to the unit that its tag names.
    unit: float = 1.0


def tag_of(line: NamedSeries) -> str:
    """With the module, optimizer or host behind it where there are several."""
    tag = SHOWN[line.figure].tag
    return f"{tag}/{safe_name(line.of)}" if line.of else tag


def safe_name(name: str) -> str:
    """Names of the job's as part of a tag; slashes would make folders of them."""
    return re.sub(r"[^\w.-]", "_", name)


def _rate(tag: str, way: str, what: str) -> TagInfo:
    return TagInfo(
        f"{tag}/{way}_MB_per_s", f"{what}, {way}, in 1e6 bytes a second since the sample before.", _MB
    )


def _part(name: str, about: str) -> TagInfo:
    return TagInfo(f"step_time/{name}_ms", about, _MILLISECONDS)


SHOWN: dict[SeriesKind, TagInfo] = {
    SeriesKind.AGREEMENT: TagInfo(
        "agreement/agree",
        "1: parameters are the same to the bit after this step. In a rank's run: the same as the majority's.",
    ),
    SeriesKind.DIFFERING: TagInfo(
        "agreement/parameters_that_differ",
        "Parameters that are not the same to the bit on all ranks after this step.",
    ),
    SeriesKind.NORM_BEFORE: TagInfo(
        "gradients/norm_before_allreduce",
        "Norm of this rank's own gradients, from sketches: right to within a fifth.",
    ),
    SeriesKind.NORM_AFTER: TagInfo(
        "gradients/norm_after_allreduce",
        "Norm of the gradients after the AllReduce, of which each rank tells a share: right to within a fifth.",
    ),
    SeriesKind.OFF_MEAN: TagInfo(
        "gradients/mean_check_error",
        "Distance of the reduced gradients from the mean of the ranks' own, over what rounding explains. "
        "Above 1 the AllReduce did not give the mean.",
    ),
    SeriesKind.LOSS: TagInfo(
        "loss/loss",
        "What backward() was called on, summed from one step to the next; in the run `job`, the mean over ranks.",
    ),
    SeriesKind.STEP: _part("step", "From the end of one optimizer step to the end of the next."),
    SeriesKind.DATA: _part("data", "Waiting for the data loader."),
    SeriesKind.FORWARD: _part("forward", "Forward through DDP's wrapper."),
    SeriesKind.BACKWARD: _part("backward", "Backward, without waiting for communication."),
    SeriesKind.OPTIMIZER: _part("optimizer", "The optimizer's step."),
    SeriesKind.OTHER: _part("other", "What nobody clocked."),
    SeriesKind.WAIT: _part("wait", "Waiting for communication, and in it for ranks that come later."),
    SeriesKind.WATCHING: _part("ddpcheck", "ddpcheck's own work, on top of the step."),
    SeriesKind.EXPOSED: TagInfo(
        "communication/exposed_ms",
        "The shortest wait of any rank in this step: communication that was not hidden behind the backward.",
        _MILLISECONDS,
    ),
    SeriesKind.FOR_OTHERS: TagInfo(
        "communication/waiting_for_others_ms",
        "What this rank waited longer than the one that came last.",
        _MILLISECONDS,
    ),
    SeriesKind.MEMORY: TagInfo(
        "memory/after_step_MiB",
        "What this rank held after the step: torch's memory on its device, or the process's own pages.",
        _MIB,
    ),
    SeriesKind.MEMORY_HIGH: TagInfo(
        "memory/high_MiB", "On a device its peak in the step; else what was held as the backward began.", _MIB
    ),
    SeriesKind.OVERLAP: TagInfo(
        "profiled/overlap_percent",
        "Of the time in which collectives ran, the share in which compute ran too; from ddpcheck's own reading "
        "of the trace.",
    ),
    SeriesKind.PROFILED_EXPOSED: TagInfo(
        "profiled/exposed_ms", "Communication while nothing was computed.", _MILLISECONDS
    ),
    SeriesKind.PROFILED_TRANSFER: TagInfo(
        "profiled/exposed_transfer_ms", "Of what was exposed: transfers; mean over ranks.", _MILLISECONDS
    ),
    SeriesKind.PROFILED_WAIT: TagInfo(
        "profiled/exposed_wait_ms",
        "Of what was exposed: waiting for the last rank; mean over ranks.",
        _MILLISECONDS,
    ),
    SeriesKind.CPU: TagInfo("node/cpu_percent", "How busy the node's processors were."),
    SeriesKind.NETWORK_SENT: _rate("network", "sent", "All interfaces of the node but the loopback"),
    SeriesKind.NETWORK_RECEIVED: _rate("network", "received", "All interfaces of the node but the loopback"),
    SeriesKind.LOOPBACK_SENT: _rate(
        "loopback", "sent", "The node's loopback, over which gloo talks within a node"
    ),
    SeriesKind.LOOPBACK_RECEIVED: _rate(
        "loopback", "received", "The node's loopback, over which gloo talks within a node"
    ),
    SeriesKind.INFINIBAND_SENT: _rate("infiniband", "sent", "All InfiniBand ports of the node"),
    SeriesKind.INFINIBAND_RECEIVED: _rate("infiniband", "received", "All InfiniBand ports of the node"),
    SeriesKind.NVLINK_SENT: _rate("nvlink", "sent", "All NVLinks of this rank's GPU"),
    SeriesKind.NVLINK_RECEIVED: _rate("nvlink", "received", "All NVLinks of this rank's GPU"),
    SeriesKind.PCIE_SENT: _rate("pcie", "sent", "PCIe of this rank's GPU"),
    SeriesKind.PCIE_RECEIVED: _rate("pcie", "received", "PCIe of this rank's GPU"),
    SeriesKind.GPU_BUSY: TagInfo("gpu/busy_percent", "How busy this rank's GPU was."),
    SeriesKind.GPU_MEMORY: TagInfo("gpu/memory_MiB", "What all processes held of this rank's GPU.", _MIB),
}

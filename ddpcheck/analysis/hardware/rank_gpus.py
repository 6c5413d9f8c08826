"""Which rank uses which GPU: by the UUID or PCI id that the rank recorded, and only without them by its process id.

Inside a container, NVML gives the process ids of the host, which are not those of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.hardware.samples import GpuFacts, NodeSamples
from ddpcheck.records.kinds.rank import DeviceRecord

_PREFIX = re.compile(r"^(mig-gpu-|mig-|gpu-)")
_PCI = re.compile(r"^(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f])?$")


class MatchedBy(str, Enum):
    """How the GPU of a rank was found (`hardware` of report.json)."""

    UUID = "uuid"
    PCI = "pci"
    PROCESS = "process"


@dataclass(frozen=True)
class GpuMatch:
    """A GPU by its index in the samples, and its MIG slice if the rank has only that."""

    index: int
    by: MatchedBy
    mig: int | None = None


def normalized_uuid(text: str) -> str:
    """Without the prefixes of NVML: torch has none. "MIG-GPU-uuid/1/0" of old drivers is the UUID of the GPU."""
    return _PREFIX.sub("", text.strip().lower()).partition("/")[0]


def normalized_pci(text: str) -> str:
    """Domain, bus and device without leading zeros and function: NVML has eight digits of the domain, torch four."""
    match = _PCI.match(text.strip().lower())
    if match is None:
        return ""
    return ":".join(f"{int(part or '0', 16):x}" for part in match.groups())


def match_gpu(record: DeviceRecord, gpus: Sequence[GpuFacts]) -> GpuMatch | None:
    """The GPU of a device record; None if none of them is that, or several could be."""
    uuid = normalized_uuid(record.uuid)
    if uuid:
        for index, gpu in enumerate(gpus):
            for number, (of_slice, _) in enumerate(gpu.mig):
                if normalized_uuid(of_slice) == uuid:
                    return GpuMatch(index, MatchedBy.UUID, number)
            if normalized_uuid(gpu.uuid) == uuid:
                return GpuMatch(index, MatchedBy.UUID)
    pci = normalized_pci(record.pci)
    same = [index for index, gpu in enumerate(gpus) if pci and normalized_pci(gpu.bus) == pci]
    # Partitions of one GPU share its bus and device.
    return GpuMatch(same[0], MatchedBy.PCI) if len(same) == 1 else None


def match_ranks(attempt: Attempt, nodes: Iterable[NodeSamples]) -> None:
    """Set the GPUs of all ranks of each node. What the process ids showed is kept for ranks without a match."""
    devices = attempt.collector(DeviceCollector).devices
    for node in nodes:
        for number, rank in attempt.ranks.items():
            if rank.header.host != node.host:
                continue
            matches = [match_gpu(record, node.facts.gpus) for record in devices.get(number, ())]
            matched = {match.index: match for match in matches if match is not None}
            row = node.statistics.ranks.get(str(number))
            if matched:
                if row is None:
                    row = node.statistics.ranks[str(number)] = node.statistics.empty_rank()
                row["gpus"] = set(matched)
                row["gpus_by"] = next(iter(matched.values())).by.value
                slices = [(match.index, match.mig) for match in matched.values() if match.mig is not None]
                row["mig"] = slices
                if slices and not row["gpu_memory"]:
                    row["gpu_memory"] = sum(_slice_memory(node, *each) for each in slices)
            elif row is not None and row["gpus"]:
                row["gpus_by"] = MatchedBy.PROCESS.value


def _slice_memory(node: NodeSamples, index: int, mig: int) -> int:
    peaks = node.gpu_statistics(index).mig
    return peaks[mig] if mig < len(peaks) else 0


def ranks_on(node: NodeSamples, index: int, mig: int | None = None) -> list[int]:
    """The ranks that use a GPU, or one of its MIG slices."""
    return sorted(
        int(rank)
        for rank, row in node.statistics.ranks.items()
        if rank.isdecimal() and index in row["gpus"] and (mig is None or (index, mig) in row.get("mig", ()))
    )

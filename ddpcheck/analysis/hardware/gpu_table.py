"""One GPU in the key `hardware` of report.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddpcheck.analysis.hardware.facts import GpuFacts
from ddpcheck.analysis.hardware.node_samples import NodeSamples
from ddpcheck.analysis.hardware.sample import Gpu

# NVML's bits for lower clocks that somebody should know of; idling and settings of the user are none.
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def gpu_row(node: NodeSamples, place: int, facts: GpuFacts) -> dict[str, Any]:
    seen = [sample.gpus[place] for sample in node.series if place < len(sample.gpus)]
    if node.last is not None and place < len(node.last.gpus):
        seen.append(node.last.gpus[place])
    told = [gpu for gpu in seen if not gpu.lost] or [Gpu()]
    last = told[-1]
    return {
        "index": facts.index,
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "memory": {"total": facts.memory, "most": _highest(gpu.memory for gpu in told)},
        "busy": spread([gpu.busy for gpu in told if gpu.busy is not None]),
        "clock": {"highest": facts.clock, "lowest_seen": _lowest(gpu.clock for gpu in told)},
        "throttled": _throttling(told),
        "temperature": _highest(gpu.temperature for gpu in told),
        "power_watts": _watts(told),
        "ecc": {"corrected": last.ecc[0], "uncorrected": last.ecc[1]} if len(last.ecc) == 2 else None,
        "nvlinks": facts.nvlinks,
        "nvlink": _moved(last.nvlink),
        "pcie": _moved(last.pcie),
        "pcie_link": {"most": _link(facts.pcie), "now": _link(last.pcie_link)},
        "mig": [{"uuid": uuid, "memory": memory} for uuid, memory in facts.mig],
        "unsupported": list(facts.unsupported),
        "lost": next((gpu.lost for gpu in seen if gpu.lost), ""),
    }


def _link(numbers: tuple[int, ...]) -> dict[str, int] | None:
    return {"generation": numbers[0], "width": numbers[1]} if len(numbers) == 2 else None


def _throttling(seen: Sequence[Gpu]) -> dict[str, float]:
    """By reason, the share of samples in which clocks were held down."""
    shares = {
        name: sum(bool(gpu.throttled & bit) for gpu in seen) / len(seen) for bit, name in _THROTTLING.items()
    }
    return {name: _rounded(share) for name, share in shares.items() if share}


def _watts(seen: Sequence[Gpu]) -> float | None:
    most = _highest(gpu.power for gpu in seen)
    return None if most is None else _rounded(most / 1000)


def _moved(pair: tuple[int, int] | None) -> dict[str, int] | None:
    return None if pair is None else {"sent": pair[0], "received": pair[1]}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": _rounded(sum(values) / len(values)), "most": max(values)}


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _lowest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _rounded(value: float) -> float:
    return round(value, 2)

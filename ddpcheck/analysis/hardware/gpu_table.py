"""One GPU in the key `hardware` of report.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def gpu_row(node: NodeSamples, index: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    seen = [sample.gpus[index] for sample in node.series if index < len(sample.gpus)]
    if node.last is not None and index < len(node.last.gpus):
        seen.append(node.last.gpus[index])
    told = [gpu for gpu in seen if not gpu.lost] or [Gpu()]
    lost = next((gpu.lost for gpu in seen if gpu.lost), "")
    links = [gpu.pcie_link for gpu in told if gpu.pcie_link]
    return {
        "index": index,
        "name": facts.get("name", ""),
        "uuid": facts.get("uuid", ""),
        "bus": facts.get("bus", ""),
        "memory": {"total": facts.get("memory"), "most": _highest(gpu.memory for gpu in told)},
        "busy": spread([gpu.busy for gpu in told if gpu.busy is not None]),
        "clock": {"highest": facts.get("clock"), "lowest_seen": _lowest(gpu.clock for gpu in told)},
        "throttled": _throttling(told),
        "temperature": _highest(gpu.temperature for gpu in told),
        "power_watts": _watts(told),
        "ecc": {"corrected": told[-1].ecc[0], "uncorrected": told[-1].ecc[1]} if told[-1].ecc else None,
        "nvlinks": len(facts.get("nvlinks") or ()),
        "nvlink": _moved(told[-1].nvlink),
        "pcie": _moved(told[-1].pcie),
        # [generation, width]
        "pcie_link": {"most": facts.get("pcie"), "now": list(links[-1]) if links else None},
        "mig": facts.get("mig") or [],
        "unsupported": facts.get("unsupported") or [],
        "lost": lost,
    }


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

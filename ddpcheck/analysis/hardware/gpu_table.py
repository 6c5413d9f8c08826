"""One GPU in the key `hardware` of report.json."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.hardware.facts import GpuFacts
from ddpcheck.analysis.hardware.tally import GpuTally


def gpu_row(facts: GpuFacts, tally: GpuTally) -> dict[str, Any]:
    last = tally.last
    return {
        "index": facts.index,
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "memory": {"total": facts.memory, "most": tally.memory},
        "busy": tally.busy.row(),
        "clock": {"highest": facts.clock, "lowest_seen": tally.lowest_clock},
        "throttled": tally.throttling(),
        "temperature": tally.temperature,
        "power_watts": None if tally.power is None else round(tally.power / 1000, 2),
        "ecc": {"corrected": last.ecc[0], "uncorrected": last.ecc[1]} if len(last.ecc) == 2 else None,
        "nvlinks": facts.nvlinks,
        "nvlink": _moved(last.nvlink),
        "pcie": _moved(last.pcie),
        "pcie_link": {"most": _link(facts.pcie), "now": _link(last.pcie_link)},
        "mig": [{"uuid": uuid, "memory": memory} for uuid, memory in facts.mig],
        "unsupported": list(facts.unsupported),
        "lost": tally.lost,
    }


def _link(numbers: tuple[int, ...]) -> dict[str, int] | None:
    return {"generation": numbers[0], "width": numbers[1]} if len(numbers) == 2 else None


def _moved(pair: tuple[int, int] | None) -> dict[str, int] | None:
    return None if pair is None else {"sent": pair[0], "received": pair[1]}

"""One GPU in the key `hardware` of report.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcheck.analysis.hardware.facts import GpuFacts
from ddpcheck.analysis.hardware.gpu_remarks import remarks_on
from ddpcheck.analysis.hardware.sample import Gpu
from ddpcheck.analysis.hardware.statistics import GpuTally


def gpu_row(facts: GpuFacts, tally: GpuTally, ranks: Mapping[int, str]) -> dict[str, Any]:
    """`ranks`: by process id."""
    last = tally.last
    return {
        "index": facts.index,
        "name": facts.name,
        "uuid": facts.uuid,
        "bus": facts.bus,
        "memory": {"total": facts.memory, "most": tally.memory},
        "busy": tally.busy.row(),
        "memory_busy": tally.memory_busy.row(),
        "clock": {
            "highest": facts.clock,
            "mean": None if (clock := tally.clock.row()) is None else clock["mean"],
            "lowest_seen": tally.lowest_clock,
            "memory_lowest_seen": tally.lowest_memory_clock,
        },
        "throttled": tally.throttling(),
        "temperature": tally.temperature,
        "power_watts": None if tally.power is None else round(tally.power / 1000, 2),
        "ecc": {"corrected": last.ecc[0], "uncorrected": last.ecc[1]} if len(last.ecc) == 2 else None,
        "nvlinks": len(facts.nvlinks),
        "nvlink": _moved(last.nvlink),
        "nvlink_by_link": _by_link(facts, last),
        "pcie": _moved(last.pcie),
        "pcie_link": {
            "most": _link(facts.pcie),
            "now": _link(last.pcie_link),
            "generation_at_work": tally.generation or None,
        },
        "processes": [
            {
                "pid": pid,
                "rank": int(rank) if (rank := ranks.get(pid, "")).isdecimal() else None,
                "most": most,
            }
            for pid, most in sorted(tally.processes.items())
        ],
        "mig": [
            {"uuid": uuid, "memory": memory, "most": tally.mig[place] if place < len(tally.mig) else None}
            for place, (uuid, memory) in enumerate(facts.mig)
        ],
        "unsupported": list(facts.unsupported),
        "lost": tally.lost,
        "remarks": remarks_on(facts, tally),
    }


def _by_link(facts: GpuFacts, last: Gpu) -> list[dict[str, int]]:
    if len(facts.nvlinks) != len(last.links):
        return []
    return [
        {"link": link, "sent": sent, "received": received}
        for link, (sent, received) in zip(facts.nvlinks, last.links, strict=True)
    ]


def _link(numbers: tuple[int, ...]) -> dict[str, int] | None:
    return {"generation": numbers[0], "width": numbers[1]} if len(numbers) == 2 else None


def _moved(pair: tuple[int, int] | None) -> dict[str, int] | None:
    return None if pair is None else {"sent": pair[0], "received": pair[1]}

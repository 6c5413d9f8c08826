"""The keys of report.json that hold measurements, for any number of ranks."""

from __future__ import annotations

from typing import Any

_PARTS = ("data", "forward", "backward", "optimizer", "other")


def measurements(ranks: int = 4, late: int = 2) -> dict[str, Any]:
    """One rank is a straggler in data loading."""
    return {
        "time": [_time(ranks, late)],
        "overlap": _overlap(ranks, late),
        "memory": {"ranks": [_memory(rank, rank == late) for rank in range(ranks)]},
        "startup": _startup(ranks, late),
        "hardware": {"nodes": [_node("node0", ranks)]},
        "traffic": _traffic(ranks),
        "links": _links(),
    }


def _spent(microseconds: int) -> dict[str, Any]:
    return {"median_us": microseconds, "p90_us": microseconds + 50, "mean_us": microseconds, "share": 0.1}


def _time(ranks: int, late: int) -> dict[str, Any]:
    return {
        "group": list(range(ranks)),
        "steps": 100,
        "first_step": 5,
        "last_step": 104,
        "every": 1,
        "pauses": 0,
        "clock": "host",
        "step_us": 12000,
        "ranks": [
            {
                "rank": rank,
                "step": _spent(12000),
                "parts": {
                    **{part: _spent(1500 + 10 * number) for number, part in enumerate(_PARTS)},
                    "data": _spent(5500 if rank == late else 500 + rank % 7),
                    "wait": _spent(200 if rank == late else 5200),
                },
                "last_arrivals": 97 if rank == late else 1,
                "watching_us": 90,
                "queued_us": None,
                "ddp_us": {},
            }
            for rank in range(ranks)
        ],
        "scaling": {
            "compute": 0.45, "data": 0.1, "other": 0.05, "exposed_communication": 0.1,
            "waiting_for_stragglers": 0.3, "efficiency": 0.55, "speed_up": 0.55 * ranks,
        },
        "straggler": {
            "ranks": [late], "cost_us": 5000, "share": 0.4, "part": "data", "own_us": 5500, "others_us": 500,
            "excess_us": {"data": 5000}, "steps_late": 97, "queued_us": None,
        },
        "cross_check": {"wait_us": 4200, "ddp_wait_us": 4000},
    }  # fmt: skip


def _overlap(ranks: int, late: int) -> dict[str, Any]:
    def part(rank: int, number: int) -> dict[str, Any]:
        wait = 0 if rank == late else 2_000_000
        start = 4_000_000 * number + (2_000_000 if rank == late else 0)
        return {
            "rank": rank, "ready_ns": start - 300_000, "start_ns": start, "end_ns": start + wait + 1_200_000,
            "hidden_ns": 700_000, "exposed_ns": 500_000, "wait_ns": wait,
        }  # fmt: skip

    return {
        "source": "ddpcheck",
        "first_step": 10,
        "end_step": 12,
        "ranks": [
            {
                "rank": rank, "file": "x", "span_ns": 24_000_000, "comm_ns": 9_000_000, "compute_ns": 12_000_000,
                "overlap_ns": 6_000_000, "exposed_ns": 3_000_000, "copy_ns": 0, "idle_ns": 1_000_000,
                "overlap_pct": 66.7, "exposed_transfer_ns": 1_000_000, "exposed_wait_ns": 2_000_000,
                "wait_ns": 2_000_000, "last_arrivals": 3, "clock_offset_ns": 0, "clock_residual_ns": 0,
                "computing": [[-2_000_000, 7_000_000], [9_000_000, 20_000_000]] if ranks <= 48 else [],
            }
            for rank in range(ranks)
        ],
        "steps": [],
        "buckets": [
            {
                "step": step, "bucket": number, "bytes": 4_200_000, "transfer_ns": 1_200_000, "skew_ns": 2_000_000,
                "last_rank": late, "algbw_gbps": 3.5, "busbw_gbps": 5.2,
                "ranks": [part(rank, number) for rank in range(ranks)],
            }
            for step in (10, 11)
            for number in range(3)
        ],
        "transfer_ns": 1,
        "matched": 6,
        "unmatched": 0,
        "origin_ns": 0,
        "advice": None,
        "left_out": ["the profile of rank 7 could not be read"],
    }  # fmt: skip


def _memory(rank: int, more: bool) -> dict[str, Any]:
    base = 900_000_000 if more else 500_000_000
    return {
        "rank": rank, "device": "cpu", "measured": "resident", "steps": 100, "before": 300_000_000,
        "parameters": 40_000_000, "buffers": 1000, "gradients": 40_000_000, "gradients_in_buckets": False,
        "buckets": 40_000_000, "optimizer_state": 80_000_000, "rest": 10_000_000, "after_step": base,
        "most": base + 10_000_000, "reserved": 0, "growth": 2_000_000.0 if more else None, "elsewhere": {},
        "curve": [[step, base + (step * 2_000_000 if more else 0)] for step in range(0, 100, 5)],
    }  # fmt: skip


def _startup(ranks: int, late: int) -> dict[str, Any]:
    def row(rank: int) -> dict[str, Any]:
        load = 3.0 if rank == late else 0.8
        stages = {
            "interpreter": 0.1, "torch": 2.1, "group": 0.4, "load": load, "copy": None, "script": 0.5,
            "wrap": 3.2 - load, "batch": 0.1, "step": 0.3,
        }  # fmt: skip
        return {
            "rank": rank, "host": "node0", "began": 1000.0 + rank * 0.05, "total": sum(filter(None, stages.values())),
            **stages, "waited": 0.1, "broadcast": 0.1, "loaded_bytes": 10, "storage_bytes": 10, "files": [],
            "ways": [], "direct": False, "copied_bytes": 0, "broadcast_bytes": 40_000_000, "host_memory": {},
            "device_memory": {},
        }  # fmt: skip

    return {
        "scenario": "every rank reads", "summary": "4 ranks read 160 MB.", "equal_before": True, "loaded_bytes": 1,
        "storage_bytes": 1, "repeated_bytes": 1, "broadcast_bytes": 40_000_000, "broadcast_seconds": 0.1,
        "broadcast_rate": 4e8, "copied_bytes": 0, "copy_rate": None, "ranks": [row(rank) for rank in range(ranks)],
    }  # fmt: skip


def _node(host: str, ranks: int) -> dict[str, Any]:
    moments = [1000.0 + number for number in range(30)]
    wave = [1_000_000 * (number % 7) for number in range(30)]
    return {
        "host": host, "samples": 30, "seconds": 29.0, "cpus": 8, "cpu": {"mean": 61.0, "most": 99.0},
        "memory": {"total": 16_000_000_000, "most": 9_000_000_000}, "infiniband": [], "ranks": {}, "driver": "",
        "interfaces": [{"name": "eth0", "class": "network", "speed": 10_000, "received": 5, "sent": 5}],
        "note": "", "topology": [], "p2p": [],
        "gpus": [
            {
                "index": 0, "name": "A100", "busy": {"mean": 80.0, "most": 100.0},
                "memory": {"total": 40_000_000_000, "most": 30_000_000_000}, "lost": "",
                "throttled": {"power cap": 0.25}, "clock": {"highest": 1410, "mean": 1350.0}, "temperature": 71,
                "power_watts": 390.5, "pcie": {"sent": 7_000_000, "received": 8_000_000},
                "pcie_link": {"most": {"generation": 4, "width": 16}, "now": {"generation": 4, "width": 8}},
                "nvlink_by_link": [{"link": 0, "sent": 5_000_000, "received": 6_000_000}],
                "processes": [{"pid": 4242, "rank": 0, "most": 29_000_000_000}],
                "remarks": ["power cap in 25 % of the samples", "PCIe runs x8 of x16"],
            }
        ],
        "series": {
            "time": moments, "cpu": [50.0 + number for number in range(30)], "memory": [1] * 30,
            "network": {"received": wave, "sent": wave[::-1]}, "loopback": {"received": [0] * 30, "sent": [0] * 30},
            "gpus": [{"busy": [80] * 29 + [None]}],
        },
    }  # fmt: skip


def _links() -> dict[str, Any]:
    """A ring of four nodes; the links of the third are slow."""
    rates = {(0, 3): 185, (1, 0): 192, (2, 1): 44, (3, 2): 45}
    return {
        "nodes": [{"host": f"node{node}", "ranks": [node]} for node in range(4)],
        "links": [
            {
                "source": f"node{a}", "target": f"node{b}", "source_address": f"10.0.0.{a + 1}",
                "target_address": f"10.0.0.{b + 1}", "bytes": 60_000_000, "seconds": 12.0,
                "busy_seconds": 480 / rate, "busy_share": 40 / rate, "bandwidth": rate * 125_000, "steps": 40.0,
                "retransmits": 3, "min_rtt_us": 40,
            }
            for (a, b), rate in rates.items()
        ],
        "usual": 23_562_500,
        "ports": [
            {
                "node": "node0", "name": "mlx5_0/1", "speed": 200_000, "sent": 5_000_000, "received": 5_000_000,
                "errors": 0, "waited": 12, "seconds": 12.0,
            }
        ],
        "slow": {
            "nodes": ["node2"], "address": "", "bandwidth": 5_562_500, "usual": 23_562_500, "factor": 4.24,
            "cost_us": 209_000,
        },
        "slow_port": None,
    }  # fmt: skip


def _traffic(ranks: int) -> dict[str, Any]:
    moved = {"sent": 61_000_000, "received": 60_000_000, "expected": 60_000_000}
    return {
        "ranks": ranks, "backend": "gloo", "gradient_bytes": 40_000_000, "expected": 240_000_000, "why_not": "",
        "nodes": [
            {
                "host": "node0", "ranks": list(range(ranks)), "steps": 90.0, "seconds": 9.0,
                "classes": {"network": moved},
                "links": [{"class": "network", "name": "eth0", "sent": 1, "received": 1, "speed": 10_000}],
            }
        ],
    }  # fmt: skip

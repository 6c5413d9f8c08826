"""Facts of healthy machines, which tests modify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import ConnectionAttempt, Diagnosis, DoctorContext, HostClockOffset, all_checks

GIB = 1 << 30


def loopback() -> dict[str, Any]:
    return {"name": "lo", "class": "loopback", "running": True, "mtu": 65536, "addresses": ["127.0.0.1/8"]}


def card(
    name: str, address: str, *, mtu: int = 1500, speed: int | None = 10_000, up: bool = True
) -> dict[str, Any]:
    addresses = [address] if address else []
    row = {"name": name, "class": "network", "running": up, "driver": "mlx5_core", "speed": speed}
    return {**row, "mtu": mtu, "addresses": addresses}


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    row = {"index": index, "name": "A100", "uuid": f"GPU-{index:04d}", "memory": 80 * GIB, "nvlinks": [0, 1]}
    return {**row, "pcie": [4, 16], "mig": [], **changes}


def with_gpus(count: int, **now: Any) -> dict[str, Any]:
    busy = {"memory": 1 << 20, "throttled": 1, "processes": {}, "pcie_link": [1, 16], **now}
    every = [["X" if a == b else "NV2" for b in range(count)] for a in range(count)]
    return {
        "note": "",
        "driver": "570.1",
        "gpus": [gpu(index) for index in range(count)],
        "now": [dict(busy) for _ in range(count)],
        "topology": every,
        "p2p": [[True] * count for _ in range(count)],
    }


def machine(number: int = 0, **changes: Any) -> Facts:
    """A healthy machine without GPUs."""
    address = f"10.0.0.{number + 1}"
    facts = Facts(
        host=f"node{number}",
        place=f"machine{number}",
        python={"version": "3.11.7", "executable": "/usr/bin/python3", "flags": {}},
        torch={
            "version": "2.13.0",
            "cuda": None,
            "backends": ["gloo"],
            "nccl": "",
            "gpus": 0,
            "threads": 2,
            "gloo_takes": {"addresses": [address]},
        },
        names={"host": f"node{number}", "addresses": [address], "own": [address]},
        interfaces=[loopback(), card("eth0", f"{address}/24")],
        gpus={"note": "no NVIDIA driver on this node", "now": []},
        limits={"open_files": [65536, 65536], "processes": [96343, 96343], "locked_memory": [8 << 20, None]},
        memory={
            "total": 64 * GIB,
            "available": 60 * GIB,
            "limit": None,
            "shared": {"total": 32 * GIB, "free": 32 * GIB, "writable": True},
        },
        processors={"all": 8, "allowed": list(range(8)), "quota": None},
        folder={"path": "/work/ddpcheck-runs", "kind": "ext4", "writable": True, "free": 100 * GIB},
        injection={
            "into": "the rank",
            "armed": True,
            "first_on_path": True,
            "sitecustomize": "",
            "flags": [],
        },
    )
    return replace(facts, **changes)


def on_gpus(count: int = 2, **now: Any) -> dict[str, Any]:
    torch = {**machine().torch, "cuda": "12.8", "backends": ["gloo", "nccl"], "nccl": "2.27.3", "gpus": count}
    cache = {"cache": "/home/me/.triton/cache", "cache_writable": True}
    torch["triton"] = {"version": "3.9.0", "compiler": "/usr/bin/gcc", "headers": True, **cache}
    return {"gpus": with_gpus(count, **now), "torch": torch}


def job(
    hosts: int = 2, ranks: int = 2, change: Callable[[Facts], Facts] | None = None, **more: Any
) -> DoctorContext:
    """`hosts` hosts with `ranks` ranks each; `change` is applied to the facts of each rank."""
    facts = []
    for rank in range(hosts * ranks):
        number = rank // ranks
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "OMP_NUM_THREADS": "2"}
        one = machine(
            number,
            rank=rank,
            world_size=hosts * ranks,
            local_rank=rank % ranks,
            local_world_size=ranks,
            environment=environment,
        )
        facts.append(one if change is None else change(one))
    known = {
        "clocks": tuple(HostClockOffset(f"node{number}", 0.002, 0.001) for number in range(1, hosts)),
        "calls": tuple(
            ConnectionAttempt(f"node{a}", f"node{b}", f"10.0.0.{b + 1}")
            for a in range(hosts)
            for b in range(hosts)
            if a != b
        ),
    }
    return DoctorContext(tuple(facts), hosts * ranks, **{**known, **more})


def single(**changes: Any) -> DoctorContext:
    return DoctorContext((machine(**changes),))


def problems(context: DoctorContext, name: str) -> list[Diagnosis]:
    """Diagnoses of the check `name` that are not "ok"."""
    [check] = [check for check in all_checks() if name == check.name]
    return [one for one in check.run(context) if not one.passed]


def the_problem(context: DoctorContext, name: str) -> Diagnosis:
    findings = problems(context, name)
    assert len({(one.severity, one.message) for one in findings}) == 1, findings
    return findings[0]

"""One line of a node's samples, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.analysis.hardware.checked import number, rows, text, whole, wholes

Totals = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None is what the device does not tell."""

    memory: int | None = None
    busy: int | None = None
    memory_busy: int | None = None
    clock: int | None = None
    memory_clock: int | None = None
    throttled: int = 0
    temperature: int | None = None
    power: int | None = None
    ecc: tuple[int, ...] = ()
    # By NVLink, bytes sent and received since the first sample.
    links: tuple[tuple[int, int], ...] = ()
    pcie: tuple[int, int] | None = None
    # Where the device counts no bytes over PCIe: bytes a second, at that moment.
    pcie_rate: tuple[int, int] | None = None
    pcie_link: tuple[int, ...] = ()
    # By process id; 0 where the driver does not tell how much.
    processes: Mapping[int, int] = field(default_factory=dict)
    # Bytes used of each MIG slice.
    mig: tuple[int, ...] = ()
    lost: str = ""

    @property
    def nvlink(self) -> tuple[int, int] | None:
        """Over all links."""
        return (
            (sum(link[0] for link in self.links), sum(link[1] for link in self.links)) if self.links else None
        )


@dataclass(frozen=True)
class Sample:
    """A node at one moment. Totals count from the first sample."""

    time: float
    # None is what could not be read.
    cpu: float | None = None
    memory: int | None = None
    # By interface: bytes received and sent, errors received and sent, drops received and sent.
    interfaces: Totals = field(default_factory=dict)
    # By port: bytes received and sent, errors, ticks in which it had to wait.
    infiniband: Totals = field(default_factory=dict)
    # By rank: process id, resident bytes, bytes read from and written to storage.
    ranks: Totals = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    # By "local remote" address, what the ranks sent: see ddpcheck.sampling.connections.
    connections: Totals = field(default_factory=dict)


def sample_from(raw: Mapping[str, Any]) -> Sample | None:
    """The sample in a line; None where it has no time."""
    time = number(raw.get("time"))
    if time is None:
        return None
    return Sample(
        time=time,
        cpu=number(raw.get("cpu")),
        memory=whole(raw.get("memory")),
        interfaces=_totals(raw.get("interfaces"), 6),
        infiniband=_ports(raw.get("infiniband")),
        connections=_totals(raw.get("connections"), 6),
        ranks=_totals(raw.get("ranks"), 4),
        gpus=tuple(map(_gpu, rows(raw.get("gpus")))),
    )


def _gpu(raw: Mapping[str, Any]) -> Gpu:
    return Gpu(
        memory=whole(raw.get("memory")),
        busy=whole(raw.get("busy")),
        memory_busy=whole(raw.get("memory_busy")),
        clock=whole(raw.get("clock")),
        memory_clock=whole(raw.get("memory_clock")),
        throttled=whole(raw.get("throttled")) or 0,
        temperature=whole(raw.get("temperature")),
        power=whole(raw.get("power")),
        ecc=wholes(raw.get("ecc")),
        links=_by_link(raw.get("nvlink")),
        pcie=_pair(raw.get("pcie")),
        pcie_rate=_pair(raw.get("pcie_rate")),
        pcie_link=wholes(raw.get("pcie_link")),
        processes=_by_pid(raw.get("processes")),
        mig=tuple(whole(used) or 0 for used in mig) if isinstance(mig := raw.get("mig"), list) else (),
        lost=text(raw.get("lost")),
    )


def _totals(raw: Any, width: int) -> Totals:
    if not isinstance(raw, dict):
        return {}
    checked = {str(name): wholes(row) for name, row in raw.items()}
    return {name: row for name, row in checked.items() if len(row) == width}


def _ports(raw: Any) -> Totals:
    """Logs of the first versions do not tell how long a port waited."""
    return {name: (*row, 0) for name, row in _totals(raw, 3).items()} | _totals(raw, 4)


def _by_link(raw: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(raw, list) or len(raw) != 2:
        return ()
    sent, received = wholes(raw[0]), wholes(raw[1])
    return tuple(zip(sent, received, strict=True)) if len(sent) == len(received) else ()


def _by_pid(raw: Any) -> dict[int, int]:
    if not isinstance(raw, dict):
        return {}
    return {int(pid): whole(size) or 0 for pid, size in raw.items() if str(pid).isdecimal()}


def _pair(raw: Any) -> tuple[int, int] | None:
    row = wholes(raw)
    return (row[0], row[1]) if len(row) == 2 else None

"""One line of a node's samples, checked: logs may be torn, old, or of another's making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Totals = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None is what the device does not tell."""

    memory: int | None = None
    busy: int | None = None
    clock: int | None = None
    throttled: int = 0
    temperature: int | None = None
    power: int | None = None
    ecc: tuple[int, ...] = ()
    # Bytes sent and received since the first sample, over all links.
    nvlink: tuple[int, int] | None = None
    pcie: tuple[int, int] | None = None
    # Where the device counts no bytes over PCIe: bytes a second, at that moment.
    pcie_rate: tuple[int, int] | None = None
    pcie_link: tuple[int, ...] = ()
    processes: Mapping[int, int] = field(default_factory=dict)
    lost: str = ""


@dataclass(frozen=True)
class Sample:
    """A node at one moment. Totals count from the first sample."""

    time: float
    cpu: float = 0.0
    memory: int = 0
    # By interface: bytes received and sent, errors received and sent, drops received and sent.
    interfaces: Totals = field(default_factory=dict)
    # By port: bytes received and sent, errors.
    infiniband: Totals = field(default_factory=dict)
    # By rank: process id, resident bytes, bytes read from and written to storage.
    ranks: Totals = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()


def sample_from(raw: Mapping[str, Any]) -> Sample | None:
    """The sample in a line; None where it has no time."""
    time = raw.get("time")
    if not isinstance(time, (int, float)) or isinstance(time, bool):
        return None
    gpus = raw.get("gpus")
    return Sample(
        time=float(time),
        cpu=float(_number(raw.get("cpu")) or 0.0),
        memory=int(_number(raw.get("memory")) or 0),
        interfaces=_totals(raw.get("interfaces"), 6),
        infiniband=_totals(raw.get("infiniband"), 3),
        ranks=_totals(raw.get("ranks"), 4),
        gpus=tuple(_gpu(each) for each in gpus if isinstance(each, dict)) if isinstance(gpus, list) else (),
    )


def _gpu(raw: Mapping[str, Any]) -> Gpu:
    return Gpu(
        memory=_whole(raw.get("memory")),
        busy=_whole(raw.get("busy")),
        clock=_whole(raw.get("clock")),
        throttled=_whole(raw.get("throttled")) or 0,
        temperature=_whole(raw.get("temperature")),
        power=_whole(raw.get("power")),
        ecc=_wholes(raw.get("ecc")),
        nvlink=_over_links(raw.get("nvlink")),
        pcie=_pair(raw.get("pcie")),
        pcie_rate=_pair(raw.get("pcie_rate")),
        pcie_link=_wholes(raw.get("pcie_link")),
        processes=_by_pid(raw.get("processes")),
        lost=str(raw.get("lost", "")),
    )


def _totals(raw: Any, width: int) -> Totals:
    if not isinstance(raw, dict):
        return {}
    rows = {str(name): _wholes(row) for name, row in raw.items()}
    return {name: row for name, row in rows.items() if len(row) == width}


def _over_links(raw: Any) -> tuple[int, int] | None:
    if not isinstance(raw, list) or len(raw) != 2:
        return None
    return sum(_wholes(raw[0])), sum(_wholes(raw[1]))


def _by_pid(raw: Any) -> dict[int, int]:
    if not isinstance(raw, dict):
        return {}
    return {int(pid): _whole(size) or 0 for pid, size in raw.items() if str(pid).isdigit()}


def _pair(raw: Any) -> tuple[int, int] | None:
    row = _wholes(raw)
    return (row[0], row[1]) if len(row) == 2 else None


def _wholes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(_whole(item) is not None for item in raw):
        return ()
    return tuple(raw)


def _whole(raw: Any) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _number(raw: Any) -> float | None:
    return raw if isinstance(raw, (int, float)) and not isinstance(raw, bool) else None

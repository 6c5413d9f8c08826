"""Hardware of a node, decoded from the node log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Counters have 64 bits; larger numbers are invalid.
_LARGEST = 1 << 64


def whole(raw: Any) -> int | None:
    return raw if type(raw) is int and 0 <= raw < _LARGEST else None


def number(raw: Any) -> float | None:
    return float(raw) if type(raw) in (int, float) and abs(raw) < _LARGEST else None


def wholes(raw: Any) -> tuple[int, ...]:
    """All values, or () if any is invalid."""
    if not isinstance(raw, list) or any(whole(item) is None for item in raw):
        return ()
    return tuple(raw)


def text(raw: Any) -> str:
    return raw if isinstance(raw, str) else ""


def texts(raw: Any) -> tuple[str, ...]:
    return tuple(item for item in raw if isinstance(item, str)) if isinstance(raw, list) else ()


def rows(raw: Any) -> list[Mapping[str, Any]]:
    return [row for row in raw if isinstance(row, dict)] if isinstance(raw, list) else []


def mapping(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, dict) else {}


@dataclass(frozen=True)
class InterfaceFacts:
    """A network interface. `speed` in Mbit/s, None if unknown."""

    name: str
    loopback: bool = False
    running: bool = True
    driver: str = ""
    speed: int | None = None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class PortFacts:
    """An InfiniBand port."""

    name: str
    speed: int | None = None
    state: str = ""
    layer: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU, by the index that NVML knows it by."""

    index: int
    name: str = ""
    uuid: str = ""
    bus: str = ""
    memory: int | None = None
    clock: int | None = None
    # Generation and width, at most.
    pcie: tuple[int, ...] = ()
    # Numbers of the active links.
    nvlinks: tuple[int, ...] = ()
    # UUID and bytes of memory of each slice.
    mig: tuple[tuple[str, int | None], ...] = ()
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """One node. `note` says why it has no GPUs."""

    namespace: str = ""
    cpus: int = 0
    memory: int = 0
    interfaces: Mapping[str, InterfaceFacts] = field(default_factory=dict)
    infiniband: Mapping[str, PortFacts] = field(default_factory=dict)
    note: str = ""
    driver: str = ""
    # In the order of the samples; unreachable GPUs are in neither.
    gpus: tuple[GpuFacts, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    p2p: tuple[tuple[bool, ...], ...] = ()


def facts_from(raw: Mapping[str, Any]) -> NodeFacts:
    nvml = mapping(raw.get("nvml"))
    return NodeFacts(
        namespace=text(raw.get("namespace")),
        cpus=whole(raw.get("cpus")) or 0,
        memory=whole(raw.get("memory")) or 0,
        interfaces={each.name: each for each in map(_interface, rows(raw.get("interfaces")))},
        infiniband={each.name: each for each in map(_port, rows(raw.get("infiniband")))},
        note=text(nvml.get("note")),
        driver=text(nvml.get("driver")),
        gpus=tuple(_gpu(place, row) for place, row in enumerate(rows(nvml.get("gpus")))),
        topology=_matrix(nvml.get("topology"), str),
        p2p=_matrix(nvml.get("p2p"), bool),
    )


def _interface(raw: Mapping[str, Any]) -> InterfaceFacts:
    return InterfaceFacts(
        name=text(raw.get("name")),
        loopback=raw.get("class") == "loopback",
        running=raw.get("running") is not False,
        driver=text(raw.get("driver")),
        speed=whole(raw.get("speed")),
        addresses=texts(raw.get("addresses")),
    )


def _port(raw: Mapping[str, Any]) -> PortFacts:
    return PortFacts(
        text(raw.get("name")), whole(raw.get("speed")), text(raw.get("state")), text(raw.get("layer"))
    )


def _gpu(position: int, raw: Mapping[str, Any]) -> GpuFacts:
    index = whole(raw.get("index"))
    return GpuFacts(
        index=position if index is None else index,
        name=text(raw.get("name")),
        uuid=text(raw.get("uuid")),
        bus=text(raw.get("bus")),
        memory=whole(raw.get("memory")),
        clock=whole(raw.get("clock")),
        pcie=wholes(raw.get("pcie")),
        nvlinks=wholes(raw.get("nvlinks")),
        mig=tuple((text(row.get("uuid")), whole(row.get("memory"))) for row in rows(raw.get("mig"))),
        unsupported=texts(raw.get("unsupported")),
    )


def _matrix(raw: Any, kind: type) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(raw, list) or not all(isinstance(row, list) for row in raw):
        return ()
    return tuple(tuple(item for item in row if isinstance(item, kind)) for row in raw)

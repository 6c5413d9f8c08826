"""The hardware of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # msgspec is not installed everywhere that this module is used.
    from ddpcheck.records.node_kinds import GpuEntry, HardwareRecord, InterfaceEntry


@dataclass(frozen=True)
class InterfaceFacts:
    """A network interface. `speed` in Mbit/s; None: not known."""

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
    """A GPU. `index` is its index in NVML."""

    index: int
    name: str = ""
    uuid: str = ""
    bus: str = ""
    memory: int | None = None
    clock: int | None = None
    # Maximum generation and width.
    pcie: tuple[int, ...] = ()
    # Numbers of the active links.
    nvlinks: tuple[int, ...] = ()
    # UUID and bytes of memory of each MIG slice.
    mig: tuple[tuple[str, int | None], ...] = ()
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """The hardware of one node. `note` says why there are no GPUs."""

    namespace: str = ""
    cpus: int = 0
    memory: int = 0
    interfaces: Mapping[str, InterfaceFacts] = field(default_factory=dict)
    infiniband: Mapping[str, PortFacts] = field(default_factory=dict)
    note: str = ""
    driver: str = ""
    # In the order of the samples. A GPU that could not be read is missing in both.
    gpus: tuple[GpuFacts, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    p2p: tuple[tuple[bool, ...], ...] = ()


def facts_from(record: HardwareRecord) -> NodeFacts:
    nvml = record.nvml
    return NodeFacts(
        namespace=record.namespace,
        cpus=record.cpus,
        memory=record.memory,
        interfaces={each.name: _interface(each) for each in record.interfaces},
        infiniband={
            each.name: PortFacts(each.name, each.speed, each.state, each.layer) for each in record.infiniband
        },
        note=nvml.note,
        driver=nvml.driver,
        gpus=tuple(_gpu(index, entry) for index, entry in enumerate(nvml.gpus)),
        topology=tuple(map(tuple, nvml.topology)),
        p2p=tuple(map(tuple, nvml.p2p)),
    )


def _interface(entry: InterfaceEntry) -> InterfaceFacts:
    return InterfaceFacts(
        name=entry.name,
        loopback=entry.type == "loopback",
        running=entry.running,
        driver=entry.driver,
        speed=entry.speed,
        addresses=tuple(entry.addresses),
    )


def _gpu(index: int, entry: GpuEntry) -> GpuFacts:
    return GpuFacts(
        index=index if entry.index is None else entry.index,
        name=entry.name,
        uuid=entry.uuid,
        bus=entry.bus,
        memory=entry.memory,
        clock=entry.clock,
        pcie=tuple(entry.pcie),
        nvlinks=tuple(entry.nvlinks),
        mig=tuple((each.uuid, each.memory) for each in entry.mig),
        unsupported=tuple(entry.unsupported),
    )

"""Hardware of each node and its samples: statistics, downsampled series, counters at the start and end of the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.hardware.statistics import (
    GpuSample,
    GpuStatistics,
    NodeSample,
    NodeStatistics,
    sample_from,
)
from ddpcheck.analysis.network.model import RouteCounterTable
from ddpcheck.analysis.timeseries.series import BoundedSeries

if TYPE_CHECKING:
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
        interfaces={each.name: _interface_facts(each) for each in record.interfaces},
        infiniband={
            each.name: PortFacts(each.name, each.speed, each.state, each.layer) for each in record.infiniband
        },
        note=nvml.note,
        driver=nvml.driver,
        gpus=tuple(_gpu_facts(index, entry) for index, entry in enumerate(nvml.gpus)),
        topology=tuple(map(tuple, nvml.topology)),
        p2p=tuple(map(tuple, nvml.p2p)),
    )


def _interface_facts(entry: InterfaceEntry) -> InterfaceFacts:
    return InterfaceFacts(
        name=entry.name,
        loopback=entry.type == "loopback",
        running=entry.running,
        driver=entry.driver,
        speed=entry.speed,
        addresses=tuple(entry.addresses),
    )


def _gpu_facts(index: int, entry: GpuEntry) -> GpuFacts:
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


Rates = list[tuple[int, int]]


def series_of(samples: Sequence[NodeSample]) -> dict[str, Any]:
    """For charts: gauges at each time, and bytes per second since the previous sample."""
    network = rates_of(samples, partial(_over_interfaces, False))
    loopback = rates_of(samples, partial(_over_interfaces, True))
    gpus = max((len(sample.gpus) for sample in samples), default=0)
    return {
        "time": [sample.time for sample in samples],
        "cpu": [sample.cpu for sample in samples],
        "memory": [sample.memory for sample in samples],
        "network": {"received": [row[0] for row in network], "sent": [row[1] for row in network]},
        "loopback": {"received": [row[0] for row in loopback], "sent": [row[1] for row in loopback]},
        "gpus": [_gpu_series(samples, index) for index in range(gpus)],
    }


def _gpu_series(samples: Sequence[NodeSample], index: int) -> dict[str, Any]:
    gauges = {
        name: [getattr(_gpu(sample, index), name) for sample in samples]
        for name in ("memory", "busy", "clock", "temperature", "power")
    }
    rates = {
        kind: [row[1] for row in rates_of(samples, partial(_both_ways, index, kind))]
        for kind in ("nvlink", "pcie")
    }
    return {**gauges, **{f"{kind}_sent": row for kind, row in rates.items()}}


def _both_ways(index: int, kind: str, sample: NodeSample) -> tuple[int, ...]:
    moved: tuple[int, int] | None = getattr(_gpu(sample, index), kind)
    return () if moved is None else (moved[1], moved[0])


def _gpu(sample: NodeSample, index: int) -> GpuSample:
    """Empty if the driver did not answer."""
    return sample.gpus[index] if index < len(sample.gpus) else GpuSample()


def _over_interfaces(loopback: bool, sample: NodeSample) -> tuple[int, ...]:
    rows = [row for name, row in sample.interfaces.items() if (name == "lo") is loopback]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def rates_of(samples: Sequence[NodeSample], totals: Callable[[NodeSample], tuple[int, ...]]) -> Rates:
    """Bytes per second, received and sent; 0 for the first sample."""
    rates = [(0, 0)] if samples else []
    for before, after in pairwise(samples):
        old, new = totals(before), totals(after)
        seconds = after.time - before.time
        if len(old) == len(new) == 2 and seconds > 0:
            rates.append((_rate(old[0], new[0], seconds), _rate(old[1], new[1], seconds)))
        else:
            rates.append((0, 0))
    return rates


def _rate(before: int, after: int, seconds: float) -> int:
    return round(max(0, after - before) / seconds)


# Nodes with series in the report; those of further nodes are only in the node logs.
MOST_NODES_WITH_SERIES = 16
MOST_POINTS = 120
MOST_FINE_POINTS = 1000
FEW_POINTS = 8
Window = tuple[float, float]


class DownsampledSeries(BoundedSeries):
    """At most `limit` samples of a node, evenly spaced."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, {"sample": "O"})
        self._count = 0

    @property
    def samples(self) -> list[NodeSample]:
        samples: list[NodeSample] = self.columns["sample"]
        return samples

    def add(self, sample: NodeSample) -> None:
        self.add_row(self._count, {"sample": sample})
        self._count += 1


@dataclass
class NodeSamples:
    """The samples of one launcher. The size does not depend on the length of the job."""

    host: str
    facts: NodeFacts = field(default_factory=NodeFacts)
    # CPU time of the sampler; None if the launcher did not end normally.
    cpu_seconds: float | None = None
    count: int = 0
    first: NodeSample | None = None
    last: NodeSample | None = None
    # The first and the last sample during the steps.
    opening: NodeSample | None = None
    closing: NodeSample | None = None
    statistics: NodeStatistics = field(default_factory=NodeStatistics)
    # What its ranks sent to other addresses during the steps.
    routes: RouteCounterTable = field(default_factory=RouteCounterTable)
    # The same from other launchers on this node, each of which observed only its own ranks.
    more_routes: list[RouteCounterTable] = field(default_factory=list)
    # By index of the GPU in the samples: during the steps only.
    stepping: list[GpuStatistics] = field(default_factory=list)
    # For the report, and with more points for TensorBoard.
    coarse: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(MOST_POINTS))
    fine: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(MOST_FINE_POINTS))

    @property
    def series(self) -> list[NodeSample]:
        """For the report."""
        return self.coarse.samples

    def gpu_statistics(self, index: int) -> GpuStatistics:
        """Of the GPU at an index of the samples."""
        return self.statistics.gpus[index] if index < len(self.statistics.gpus) else GpuStatistics()

    def gpu_index(self, index: int) -> int:
        """The NVML index of the GPU at an index of the samples."""
        return self.facts.gpus[index].index if index < len(self.facts.gpus) else index

    def add(self, sample: NodeSample, window: Window | None) -> None:
        self.statistics.add(self.last, sample)
        self.first = self.first or sample
        self.last = sample
        if window is not None and window[0] <= sample.time <= window[1]:
            self.opening = self.opening or sample
            self.closing = sample
            self.routes.add(sample)
            self.stepping += [GpuStatistics() for _ in sample.gpus[len(self.stepping) :]]
            for statistics, gpu in zip(self.stepping, sample.gpus, strict=False):
                statistics.add(gpu)
        self.coarse.add(sample)
        self.fine.add(sample)
        self.count += 1


def read_nodes(folder: Path, windows: Mapping[str, Window]) -> list[NodeSamples]:
    """`windows`: start and end of the steps by host.

    One entry per node: launchers with the same host and network namespace observe the same counters.
    """
    # Not at the top: msgspec is not installed everywhere that this module is used.
    from ddpcheck.records.node_kinds import HardwareRecord, NodeLogReader, SampleRecord, SamplerEndRecord

    launchers: dict[tuple[str, int], NodeSamples] = {}
    for host, record in NodeLogReader(folder).read((HardwareRecord, SampleRecord, SamplerEndRecord)):
        assert isinstance(record, HardwareRecord | SampleRecord | SamplerEndRecord)
        key = (host, record.pid)
        node = launchers.get(key)
        if node is None:
            node = launchers[key] = NodeSamples(host)
            if len(launchers) > MOST_NODES_WITH_SERIES:
                node.coarse, node.fine = DownsampledSeries(FEW_POINTS), DownsampledSeries(FEW_POINTS)
        match record:
            case SampleRecord():
                node.add(sample_from(record), windows.get(host))
            case HardwareRecord():
                node.facts = facts_from(record)
            case SamplerEndRecord():
                node.cpu_seconds = record.cpu_seconds
    return _distinct([node for node in launchers.values() if node.count])


def _distinct(launchers: Sequence[NodeSamples]) -> list[NodeSamples]:
    """One launcher per node: all observe the same, except that each knows only its own ranks."""
    distinct: dict[tuple[str, str], NodeSamples] = {}
    for node in launchers:
        first = distinct.setdefault((node.host, node.facts.namespace), node)
        if node is not first and first.statistics.ranks.keys().isdisjoint(node.statistics.ranks):
            first.more_routes.append(node.routes)
    return list(distinct.values())

"""Statistics over all samples of a node, updated with each sample, so that no peak of a long job is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # msgspec is not installed everywhere that this module is used.
    from ddpcheck.records.node_kinds import CounterRows, GpuSampleEntry, SampleRecord

Totals = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one time. None: the device does not report it."""

    memory: int | None = None
    busy: int | None = None
    memory_busy: int | None = None
    clock: int | None = None
    memory_clock: int | None = None
    throttled: int = 0
    temperature: int | None = None
    power: int | None = None
    ecc: tuple[int, ...] = ()
    # Bytes by NVLink, sent and received since the first sample.
    links: tuple[tuple[int, int], ...] = ()
    pcie: tuple[int, int] | None = None
    # Current bytes per second, for devices that do not count bytes over PCIe.
    pcie_rate: tuple[int, int] | None = None
    pcie_link: tuple[int, ...] = ()
    # Bytes by process id; 0 if the driver does not report them.
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
class NodeSample:
    """A node at one time. Totals count from the first sample."""

    time: float
    # None: could not be read.
    cpu: float | None = None
    memory: int | None = None
    # By interface: bytes received and sent, errors received and sent, drops received and sent.
    interfaces: Totals = field(default_factory=dict)
    # By port: bytes received and sent, errors, ticks in which it waited.
    infiniband: Totals = field(default_factory=dict)
    # By rank: process id, resident bytes, bytes read from and written to storage.
    ranks: Totals = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] = ()
    # Bytes that the ranks sent by "local remote" address pair: see ddpcheck.sampling.tcp.
    connections: Totals = field(default_factory=dict)


def sample_from(record: SampleRecord) -> NodeSample:
    return NodeSample(
        time=record.time,
        cpu=record.cpu,
        memory=record.memory,
        interfaces=_totals(record.interfaces, 6),
        # Logs of the first versions lack the time that a port waited.
        infiniband={name: (*row, 0) for name, row in _totals(record.infiniband, 3).items()}
        | _totals(record.infiniband, 4),
        connections=_totals(record.connections, 6),
        ranks=_totals(record.ranks, 4),
        gpus=tuple(map(_gpu, record.gpus)),
    )


def _gpu(entry: GpuSampleEntry) -> GpuSample:
    return GpuSample(
        memory=entry.memory,
        busy=entry.busy,
        memory_busy=entry.memory_busy,
        clock=entry.clock,
        memory_clock=entry.memory_clock,
        throttled=entry.throttled,
        temperature=entry.temperature,
        power=entry.power,
        ecc=tuple(entry.ecc),
        links=_links(entry.nvlink),
        pcie=_pair(entry.pcie),
        pcie_rate=_pair(entry.pcie_rate),
        pcie_link=tuple(entry.pcie_link),
        processes={int(pid): size or 0 for pid, size in entry.processes.items() if pid.isdecimal()},
        mig=tuple(used or 0 for used in entry.mig),
        lost=entry.lost,
    )


def _totals(rows: CounterRows, width: int) -> Totals:
    return {name: tuple(row) for name, row in rows.items() if len(row) == width}


def _links(nvlink: list[list[int]]) -> tuple[tuple[int, int], ...]:
    if len(nvlink) != 2 or len(nvlink[0]) != len(nvlink[1]):
        return ()
    return tuple(zip(*nvlink, strict=True))


def _pair(row: list[int]) -> tuple[int, int] | None:
    return (row[0], row[1]) if len(row) == 2 else None


# NVML's bits for reduced clocks, without idle clocks and clocks that the user set.
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


# Minimum utilisation, in percent, of a GPU that is not idle.
AT_WORK = 50
MOST_PROCESSES = 64


@dataclass
class ValueRange:
    """Mean and maximum of a gauge."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.count += 1
            self.total += value
            self.most = max(self.most, value)

    def row(self) -> dict[str, float] | None:
        return {"mean": round(self.total / self.count, 2), "most": self.most} if self.count else None


@dataclass
class GpuStatistics:
    """One GPU over all samples in which it answered."""

    count: int = 0
    memory: int | None = None
    busy: ValueRange = field(default_factory=ValueRange)
    memory_busy: ValueRange = field(default_factory=ValueRange)
    clock: ValueRange = field(default_factory=ValueRange)
    lowest_clock: int | None = None
    lowest_memory_clock: int | None = None
    # Highest PCIe generation in samples in which the GPU was busy, and the number of these samples: an idle GPU
    # uses a lower generation.
    generation: int = 0
    at_work: int = 0
    # Maximum bytes by process id and by MIG slice.
    processes: dict[int, int] = field(default_factory=dict)
    mig: list[int] = field(default_factory=list)
    temperature: int | None = None
    power: int | None = None
    throttled: Counter[str] = field(default_factory=Counter)
    last: GpuSample = field(default_factory=GpuSample)
    lost: str = ""

    def add(self, gpu: GpuSample) -> None:
        if gpu.lost:
            self.lost = self.lost or gpu.lost
            return
        self.count += 1
        self.last = gpu
        self.memory = _highest(self.memory, gpu.memory)
        self.temperature = _highest(self.temperature, gpu.temperature)
        self.power = _highest(self.power, gpu.power)
        self.busy.add(gpu.busy)
        self.memory_busy.add(gpu.memory_busy)
        self.clock.add(gpu.clock)
        self.lowest_clock = _lowest(self.lowest_clock, gpu.clock)
        self.lowest_memory_clock = _lowest(self.lowest_memory_clock, gpu.memory_clock)
        self._add_work(gpu)
        self.throttled.update(name for bit, name in THROTTLING.items() if gpu.throttled & bit)

    def _add_work(self, gpu: GpuSample) -> None:
        if (gpu.busy or 0) >= AT_WORK and len(gpu.pcie_link) == 2:
            self.at_work += 1
            self.generation = max(self.generation, gpu.pcie_link[0])
        for pid, used in gpu.processes.items():
            if pid in self.processes or len(self.processes) < MOST_PROCESSES:
                self.processes[pid] = max(used, self.processes.get(pid, 0))
        for index, used in enumerate(gpu.mig):
            if index == len(self.mig):
                self.mig.append(0)
            self.mig[index] = max(self.mig[index], used)

    def throttling(self) -> dict[str, float]:
        """Share of samples with reduced clocks, by reason."""
        return {name: round(times / self.count, 2) for name, times in self.throttled.items()}


@dataclass
class NodeStatistics:
    """One node over all its samples."""

    cpu: ValueRange = field(default_factory=ValueRange)
    memory: int = 0
    # By rank: most_memory, storage_read, storage_written, indices of its GPUs, and peak gpu_memory.
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Rank by process id.
    pids: dict[int, str] = field(default_factory=dict)
    # Maximum bytes per second by interface, received and sent.
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    gpus: list[GpuStatistics] = field(default_factory=list)

    def add(self, before: NodeSample | None, sample: NodeSample) -> None:
        self.memory = max(self.memory, sample.memory or 0)
        for rank, row in sample.ranks.items():
            self._add_rank(rank, row, sample)
        for index, gpu in enumerate(sample.gpus):
            if index == len(self.gpus):
                self.gpus.append(GpuStatistics())
            self.gpus[index].add(gpu)
        if before is not None:  # shares and rates refer to the previous sample
            self.cpu.add(sample.cpu)
            self._add_rates(before, sample)

    @staticmethod
    def empty_rank() -> dict[str, Any]:
        return {"most_memory": 0, "gpu_memory": 0, "storage_read": 0, "storage_written": 0, "gpus": set()}

    def _add_rank(self, rank: str, row: tuple[int, ...], sample: NodeSample) -> None:
        pid, resident, read, written = row
        self.pids[pid] = rank
        known = self.ranks.setdefault(rank, self.empty_rank())
        known["most_memory"] = max(known["most_memory"], resident)
        known["storage_read"], known["storage_written"] = read, written
        known["gpus"] |= {index for index, gpu in enumerate(sample.gpus) if pid in gpu.processes}
        known["gpu_memory"] = max(known["gpu_memory"], sum(gpu.processes.get(pid, 0) for gpu in sample.gpus))

    def _add_rates(self, before: NodeSample, sample: NodeSample) -> None:
        seconds = sample.time - before.time
        for name, row in sample.interfaces.items():
            old = before.interfaces.get(name)
            if old is not None and seconds > 0:
                most = self.rates.get(name, (0, 0))
                received, sent = (
                    round((new - was) / seconds) for new, was in zip(row[:2], old[:2], strict=True)
                )
                self.rates[name] = (max(most[0], received), max(most[1], sent))


def _lowest(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _highest(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)

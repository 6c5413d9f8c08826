"""Samples of a node, decoded from its log, and their statistics, which include every peak of a long job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.analysis.hardware.facts import number, rows, text, whole, wholes

Totals = dict[str, tuple[int, ...]]

# NVML's throttling bits that are reported; idle clocks and user settings are not.
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# Utilization in percent from which a GPU counts as busy.
AT_WORK = 50
MOST_PROCESSES = 64


@dataclass(frozen=True)
class GpuSample:
    """One sample of a GPU; None if the device does not report a value."""

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
    # Bytes per second, for devices without PCIe byte counters.
    pcie_rate: tuple[int, int] | None = None
    pcie_link: tuple[int, ...] = ()
    # Bytes by process id; 0 if the driver does not report them.
    processes: Mapping[int, int] = field(default_factory=dict)
    # Bytes used of each MIG slice.
    mig: tuple[int, ...] = ()
    lost: str = ""

    @property
    def nvlink(self) -> tuple[int, int] | None:
        """Bytes over all NVLinks."""
        return (
            (sum(link[0] for link in self.links), sum(link[1] for link in self.links)) if self.links else None
        )


@dataclass(frozen=True)
class NodeSample:
    """One sample of a node. Totals count from the first sample."""

    time: float
    # None if it could not be read.
    cpu: float | None = None
    memory: int | None = None
    # By interface: bytes received and sent, errors received and sent, drops received and sent.
    interfaces: Totals = field(default_factory=dict)
    # By port: bytes received and sent, errors, ticks in which it waited.
    infiniband: Totals = field(default_factory=dict)
    # By rank: process id, resident bytes, bytes read from and written to storage.
    ranks: Totals = field(default_factory=dict)
    gpus: tuple[GpuSample, ...] = ()
    # By "local remote" address, what the ranks sent: see ddpcheck.sampling.tcp.
    connections: Totals = field(default_factory=dict)


def sample_from(raw: Mapping[str, Any]) -> NodeSample | None:
    """The sample in a line; None if it has no time."""
    time = number(raw.get("time"))
    if time is None:
        return None
    return NodeSample(
        time=time,
        cpu=number(raw.get("cpu")),
        memory=whole(raw.get("memory")),
        interfaces=_totals(raw.get("interfaces"), 6),
        infiniband=_ports(raw.get("infiniband")),
        connections=_totals(raw.get("connections"), 6),
        ranks=_totals(raw.get("ranks"), 4),
        gpus=tuple(map(_gpu, rows(raw.get("gpus")))),
    )


def _gpu(raw: Mapping[str, Any]) -> GpuSample:
    return GpuSample(
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
    """Logs of the first versions do not contain how long a port waited."""
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
    # The highest PCIe generation in busy samples, and their number: an idle link slows down.
    generation: int = 0
    at_work: int = 0
    # Peak memory by process id and by MIG slice.
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
        for position, used in enumerate(gpu.mig):
            if position == len(self.mig):
                self.mig.append(0)
            self.mig[position] = max(self.mig[position], used)

    def throttling(self) -> dict[str, float]:
        """Share of throttled samples by reason."""
        return {name: round(times / self.count, 2) for name, times in self.throttled.items()}


@dataclass
class NodeStatistics:
    """One node over all its samples."""

    cpu: ValueRange = field(default_factory=ValueRange)
    memory: int = 0
    # By rank: most_memory, storage_read, storage_written, positions of its GPUs, peak gpu_memory.
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By process id, the rank.
    pids: dict[int, str] = field(default_factory=dict)
    # By interface: maximum of bytes per second, received and sent.
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    gpus: list[GpuStatistics] = field(default_factory=list)

    def add(self, before: NodeSample | None, sample: NodeSample) -> None:
        self.memory = max(self.memory, sample.memory or 0)
        for rank, row in sample.ranks.items():
            self._add_rank(rank, row, sample)
        for position, gpu in enumerate(sample.gpus):
            if position == len(self.gpus):
                self.gpus.append(GpuStatistics())
            self.gpus[position].add(gpu)
        if before is not None:  # shares and rates are relative to the previous sample
            self.cpu.add(sample.cpu)
            self._add_rates(before, sample)

    def _add_rank(self, rank: str, row: tuple[int, ...], sample: NodeSample) -> None:
        pid, resident, read, written = row
        self.pids[pid] = rank
        known = self.ranks.setdefault(rank, {"most_memory": 0, "gpu_memory": 0, "gpus": set()})
        known["most_memory"] = max(known["most_memory"], resident)
        known["storage_read"], known["storage_written"] = read, written
        known["gpus"] |= {position for position, gpu in enumerate(sample.gpus) if pid in gpu.processes}
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

"""Samples of each node, read from the node logs: statistics, counters during the steps, and series for charts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpcheck.analysis.hardware.facts import NodeFacts, facts_from, number
from ddpcheck.analysis.hardware.statistics import (
    GpuSample,
    GpuStatistics,
    NodeSample,
    NodeStatistics,
    sample_from,
)
from ddpcheck.analysis.network.route_counters import RouteCounterTable
from ddpcheck.analysis.timeseries.series import BoundedSeries
from ddpcheck.records.node_log import node_lines

Rates = list[tuple[int, int]]
# Maximum number of nodes with series in the report.
MOST_DRAWN = 16
MOST_POINTS = 120
MOST_CLOSELY = 1000
FEW_POINTS = 8
_KINDS = ("hardware", "sample", "sampled")
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
    """Samples of one launcher, in bounded memory."""

    host: str
    facts: NodeFacts = field(default_factory=NodeFacts)
    # CPU time of sampling; None if the launcher did not end normally.
    cpu_seconds: float | None = None
    count: int = 0
    first: NodeSample | None = None
    last: NodeSample | None = None
    # The first and the last sample inside the window of the steps.
    opening: NodeSample | None = None
    closing: NodeSample | None = None
    tally: NodeStatistics = field(default_factory=NodeStatistics)
    # TCP counters of its ranks inside that window.
    routes: RouteCounterTable = field(default_factory=RouteCounterTable)
    # The same of other launchers on this node, which sample only their own ranks.
    more_routes: list[RouteCounterTable] = field(default_factory=list)
    # By position of the GPU, inside the window of the steps only.
    stepping: list[GpuStatistics] = field(default_factory=list)
    # Coarse series for the page, and a finer one for TensorBoard.
    drawn: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(MOST_POINTS))
    closely: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(MOST_CLOSELY))

    @property
    def series(self) -> list[NodeSample]:
        """The coarse series."""
        return self.drawn.samples

    def tally_of(self, position: int) -> GpuStatistics:
        """Statistics of the GPU at a position of the samples."""
        return self.tally.gpus[position] if position < len(self.tally.gpus) else GpuStatistics()

    def gpu_index(self, position: int) -> int:
        """NVML index of the GPU at a position of the samples."""
        return self.facts.gpus[position].index if position < len(self.facts.gpus) else position

    def add(self, sample: NodeSample, window: Window | None) -> None:
        self.tally.add(self.last, sample)
        self.first = self.first or sample
        self.last = sample
        if window is not None and window[0] <= sample.time <= window[1]:
            self.opening = self.opening or sample
            self.closing = sample
            self.routes.add(sample)
            self.stepping += [GpuStatistics() for _ in sample.gpus[len(self.stepping) :]]
            for tally, gpu in zip(self.stepping, sample.gpus, strict=False):
                tally.add(gpu)
        self.drawn.add(sample)
        self.closely.add(sample)
        self.count += 1


def read_nodes(folder: Path, windows: Mapping[str, Window]) -> list[NodeSamples]:
    """Read all node logs. `windows`: start and end of the steps by host.

    Launchers that share a host and a network namespace sample the same node, which is counted once.
    """
    found: dict[tuple[str, int], NodeSamples] = {}
    for host, raw in _lines(folder):
        pid = raw.get("pid")
        key = (host, pid if isinstance(pid, int) else 0)
        node = found.get(key)
        if node is None:
            node = found[key] = NodeSamples(host)
            if len(found) > MOST_DRAWN:
                node.drawn, node.closely = DownsampledSeries(FEW_POINTS), DownsampledSeries(FEW_POINTS)
        if raw["kind"] == "hardware":
            node.facts = facts_from(raw)
        elif raw["kind"] == "sampled":
            node.cpu_seconds = number(raw.get("cpu_seconds"))
        else:
            sample = sample_from(raw)
            if sample is not None:
                node.add(sample, windows.get(host))
    return _distinct([node for node in found.values() if node.count])


def _distinct(launchers: Sequence[NodeSamples]) -> list[NodeSamples]:
    """One launcher of each node: all sample the same, except the ranks, which only their own launcher knows."""
    distinct: dict[tuple[str, str], NodeSamples] = {}
    for node in launchers:
        first = distinct.setdefault((node.host, node.facts.namespace), node)
        if node is not first and first.tally.ranks.keys().isdisjoint(node.tally.ranks):
            first.more_routes.append(node.routes)
    return list(distinct.values())


def _lines(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    hosts: dict[str, str] = {}
    for name, line in node_lines(folder):
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(raw, dict):
            continue
        if raw.get("kind") == "node":
            # The file name may not contain all characters of the host name.
            hosts[name] = str(raw.get("host", ""))
        elif raw.get("kind") in _KINDS:
            yield hosts.get(name) or name.removeprefix("node-").removesuffix(".jsonl"), raw


def series_of(samples: Sequence[NodeSample]) -> dict[str, Any]:
    """Series for charts: gauges at each time, and bytes per second since the previous sample."""
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
    """The GPU's sample; empty if the driver did not answer."""
    return sample.gpus[index] if index < len(sample.gpus) else GpuSample()


def _over_interfaces(loopback: bool, sample: NodeSample) -> tuple[int, ...]:
    rows = [row for name, row in sample.interfaces.items() if (name == "lo") is loopback]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def rates_of(samples: Sequence[NodeSample], totals: Callable[[NodeSample], tuple[int, ...]]) -> Rates:
    """Bytes per second received and sent; 0 for the first sample."""
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

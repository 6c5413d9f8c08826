"""Collects the devices of all modules, and what the ranks captured into graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.backend_names import backend_on
from ddpcheck.records.kinds.rank import DeviceRecord, GraphRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Of one rank.
_MOST_DEVICES = 256


class DeviceCollector(Collector):
    """Keeps the latest totals of each rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.graphs: dict[int, GraphRecord] = {}
        self.devices: dict[int, list[DeviceRecord]] = {}

    @collects(GraphRecord)
    def add_graph(self, rank: RankData, record: GraphRecord) -> None:
        self.graphs[rank.header.rank] = record

    @collects(DeviceRecord)
    def add_device(self, rank: RankData, record: DeviceRecord) -> None:
        devices = self.devices.setdefault(rank.header.rank, [])
        if len(devices) < _MOST_DEVICES:
            devices.append(record)

    def backend(self, rank: RankData) -> str:
        """The backend that reduces the gradients of a rank: that of its first module's device."""
        for record in self.devices.get(rank.header.rank, ()):
            if record.backend:
                return record.backend
        # A module on the CPU has no record of a device.
        return backend_on(rank.header.backend, "cpu") or rank.header.backend

    def captured(self) -> GraphRecord | None:
        """Of the rank that replayed the most steps; None if no rank captured."""
        return max(
            self.graphs.values(), key=lambda graph: (graph.replayed_steps, graph.captures), default=None
        )

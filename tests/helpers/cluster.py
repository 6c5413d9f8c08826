"""Builds runs on several nodes: ranks that step once per second, and the samples of their launchers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import CommHookRecord, ModuleRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.records.registry import Record
from tests.helpers.run_builder import RunBuilder

START = 1000.0
# One parameter of float32 in a square of this width: 1 MiB.
WIDTH = 512
BYTES = 4 * WIDTH * WIDTH


@dataclass
class Interface:
    """A network interface, and the bytes that it sends and receives per second."""

    name: str
    a_second: float = 0.0
    speed: int | None = None
    addresses: Sequence[str] = ()
    running: bool = True
    loopback: bool = False

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": "loopback" if self.loopback else "network",
            "running": self.running,
            "driver": "mlx5_core",
            "speed": self.speed,
            "addresses": list(self.addresses),
        }


@dataclass
class Cluster:
    """`nodes`: the interfaces of each; ranks are assigned to them in order."""

    folder: Path
    nodes: Sequence[Sequence[Interface]]
    per_node: int = 1
    steps: int = 60
    backend: str = "gloo"
    dtype: str = "float32"
    # Reduced backwards per step; None: gradients were not recorded.
    reductions: float | None = 1.0
    hook: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    more_facts: Mapping[str, Any] = field(default_factory=dict)
    more_samples: Mapping[str, Any] = field(default_factory=dict)
    # By node and target address: Mbit/s while busy, and the busy share of the time.
    sends: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    # By node: speed of its InfiniBand port in Mbit/s, and counters per second.
    ports: Mapping[int, tuple[int, list[int]]] = field(default_factory=dict)
    # Microseconds per step of waiting for communication; 0: no step times.
    wait: int = 0
    # By node, in addition to these.
    own_samples: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    # By rank, in addition to its steps.
    more_records: Mapping[int, Sequence[Record]] = field(default_factory=dict)

    def build(self) -> RunBuilder:
        builder = RunBuilder(self.folder, len(self.nodes) * self.per_node)
        for rank in builder.ranks:
            header = builder.records[rank][0]
            assert isinstance(header, RankHeader)
            builder.records[rank][0] = replace(
                header,
                host=f"node{rank // self.per_node}",
                backend=self.backend,
                time=START,
                environment=dict(self.environment),
            )
            self._train(builder, rank)
        builder.end()
        builder.save()
        for number in range(len(self.nodes)):
            self._sample(number)
        return builder

    def _train(self, builder: RunBuilder, rank: int) -> None:
        rows = [["weight", self.dtype, [WIDTH, WIDTH], 1], ["frozen", "float32", [WIDTH, WIDTH], 0]]
        builder.add(rank, ModuleRecord(0, "Net", list(builder.ranks), 0, rows, []))
        if self.hook:
            builder.add(rank, CommHookRecord(0, self.hook, 0))
        if self.wait:
            builder.add(rank, self._clocks())
        for record in self.more_records.get(rank, ()):
            builder.add(rank, record)
        for step in range(self.steps):
            if self.reductions is not None:
                number = round((step + 1) * self.reductions)
                builder.add(rank, BackwardRecord(number, step, "", "", ""))
            builder.add(
                rank,
                DigestRecord(
                    0, "params", step, "aa", "", 2, time=START + step + 1, optimizer=0, forward=step + 1
                ),
            )

    def _clocks(self) -> ClockRecord:
        parts = {"forward": 100_000, "backward": 200_000, "wait": self.wait, "data": 0, "optimizer": 1000}
        columns = {
            name: [value] * self.steps for name, value in {**parts, "watching": 0, "queued": 0}.items()
        }
        return ClockRecord(0, total=[1_000_000] * self.steps, **columns)

    def _port_facts(self, number: int) -> list[dict[str, Any]]:
        return [{"name": "mlx5_0/1", "speed": self.ports[number][0]}] if number in self.ports else []

    def _counted(self, number: int, passed: float) -> dict[str, Any]:
        local = self.nodes[number][0].addresses[0].partition("/")[0] if number in self.sends else ""
        connections = {
            f"{local} {remote}": [
                round(rate * 125_000 * share * passed),
                round(share * passed * 1e6),
                round(share * passed * 1e6),
                0,
                90,
                2,
            ]
            for remote, (rate, share) in self.sends.get(number, {}).items()
        }
        ports = (
            {"mlx5_0/1": [round(each * passed) for each in self.ports[number][1]]}
            if number in self.ports
            else {}
        )
        return {"connections": connections, "infiniband": ports}

    def _sample(self, number: int) -> None:
        host, interfaces = f"node{number}", self.nodes[number]
        lines: list[dict[str, Any]] = [
            {"kind": "node", "host": host, "pid": 10 + number},
            {
                "kind": "hardware",
                "pid": 10 + number,
                "namespace": f"net:[{number}]",
                "cpus": 8,
                "memory": 1 << 36,
                "interfaces": [interface.facts() for interface in interfaces],
                "infiniband": self._port_facts(number),
                **self.more_facts,
            },
        ]
        for half_second in range(self.steps * 2 + 10):
            passed = half_second / 2
            totals = {each.name: [round(passed * each.a_second)] * 2 + [0] * 4 for each in interfaces}
            ranks = {
                str(rank): [100 + rank, (1 << 20) * (1 + half_second), 5, 6]
                for rank in range(number * self.per_node, (number + 1) * self.per_node)
            }
            lines.append(
                {
                    "kind": "sample",
                    "pid": 10 + number,
                    "time": START + passed,
                    "cpu": 50.0,
                    "memory": 1 << 30,
                    "interfaces": totals,
                    "ranks": ranks,
                    **self._counted(number, passed),
                    **self.more_samples,
                    **self.own_samples.get(number, {}),
                }
            )
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (self.folder / f"node-{host}.jsonl").write_text(text)

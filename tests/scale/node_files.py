"""Writes the node logs of a generated run, from the log of the seed's node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.scale.lines import line_of
from tests.scale.plan import Plan
from tests.scale.rank_files import RankFiles
from tests.scale.seed import Seed

Raw = dict[str, Any]
_LAUNCHER = 9000
# Samples per second, and the maximum number of samples, as in the launcher.
_HZ, _MOST = 1.0, 1200
_INTERFACE = "eth0"
_SPEED = 100_000


class NodeFiles:
    """Traffic between nodes is that of a ring AllReduce over all ranks."""

    def __init__(self, seed: Seed, plan: Plan, folder: Path, ranks: RankFiles, begin: float) -> None:
        self._seed, self._plan, self._folder, self._ranks, self._begin = seed, plan, folder, ranks, begin
        self._samples = [raw for raw in seed.node if raw["kind"] == "sample"]
        size = sum(4 * _product(row[2]) for row in seed.module.parameters)
        self._ring = 2 * (plan.ranks - 1) / plan.ranks * size

    def write(self) -> None:
        for node in range(self._plan.nodes):
            lines = [line_of(raw) for raw in self._lines(node)]
            (self._folder / f"node-{self._plan.host(node)}.jsonl").write_text("".join(lines))

    def _lines(self, node: int) -> list[Raw]:
        plan, host = self._plan, self._plan.host(node)
        began = self._begin + self._ranks.offsets[node] - 5.0
        ended = self._ranks.ends_at(plan.ranks_of(node)[0])
        first = {"kind": "node", "time": began, "schema": 1, "host": host, "pid": _LAUNCHER, "command_pid": 1}
        exits = [
            {
                "kind": "rank_exit",
                "time": ended,
                "rank": rank,
                "pid": plan.pid(rank),
                "host": host,
                "signal": 0,
            }
            for rank in plan.ranks_of(node)
        ]
        done = {"kind": "node_done", "time": ended + 1, "host": host, "pid": _LAUNCHER, "status": 0}
        return [
            first,
            *self._hardware(node, began),
            *self._sampled(node, began, ended),
            *exits,
            {"kind": "command_exit", "time": ended + 1, "status": 0, "signal": None},
            {**done, "stopped": ""},
        ]

    def _hardware(self, node: int, time: float) -> list[Raw]:
        interface = {
            "name": _INTERFACE,
            "class": "network",
            "running": True,
            "driver": "",
            "speed": _SPEED,
            "addresses": [f"10.{node >> 8}.{node & 255}.1/8"],
        }
        return [
            {
                **raw,
                "time": time,
                "pid": _LAUNCHER,
                "namespace": f"net:[{node}]",
                "interfaces": [*(row for row in raw["interfaces"] if row["name"] == "lo"), interface],
            }
            for raw in self._seed.node
            if raw["kind"] == "hardware"
        ]

    def _sampled(self, node: int, began: float, ended: float) -> list[Raw]:
        if not self._samples:
            return []
        count = min(_MOST, int((ended - began) * _HZ))
        apart = (ended - began) / max(1, count)
        return [
            *(self._sample(node, number, began + number * apart) for number in range(count)),
            {"kind": "sampled", "time": ended, "pid": _LAUNCHER, "samples": count, "cpu_seconds": 0.0},
        ]

    def _sample(self, node: int, number: int, time: float) -> Raw:
        plan = self._plan
        seed = self._samples[number % len(self._samples)]
        seconds = time - self._begin - self._ranks.offsets[node]
        steps = min(plan.steps, max(0.0, seconds / self._ranks.step_seconds))
        away, home = round(self._ring * steps), round(self._ring * steps * (plan.per_node - 1))
        row = next(iter(seed["ranks"].values()), None)
        ranks = {} if row is None else {str(r): [plan.pid(r), *row[1:]] for r in plan.ranks_of(node)}
        return {
            **{name: seed[name] for name in ("kind", "cpu", "memory")},
            "time": round(time, 4),
            "pid": _LAUNCHER,
            "interfaces": {
                "lo": [home, home, 0, 0, 0, 0],
                _INTERFACE: [away, away, 0, 0, 0, 0],
            },
            "ranks": ranks,
        }


def _product(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size

"""The records of a real run of a few ranks, grouped by their use in a generated run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import from_mapping, to_mapping
from tests.scale.sketches import Array, Sketches

Raw = dict[str, Any]

# Written once by each rank, before training or with the first steps.
_ONCE = ("rank", "module", "startup", "optimizer", "hyper", "loader", "memory_parts")
# Written at every step; the first steps of a job are not typical.
_EACH_STEP = ("backward", "applied", "digest", "batch", "memory")
_ALWAYS = {"backward", "applied", "digest", "batch"}
_WARM_UP = 3
CLOCKS = ("total", "data", "forward", "backward", "wait", "optimizer", "watching", "queued")


@dataclass
class SeedRank:
    """The records of one rank."""

    once: list[Raw] = field(default_factory=list)
    steps: dict[int, list[Raw]] = field(default_factory=dict)
    # By step, in the order of CLOCKS; and the number of steps per record.
    clocks: dict[int, list[int]] = field(default_factory=dict)
    at_a_time: int = 1
    epoch: Raw | None = None
    last: list[Raw] = field(default_factory=list)

    def add(self, raw: Raw) -> None:
        kind = raw["kind"]
        if kind in _ONCE or (kind == "digest" and raw["step"] < 0):
            self.once.append(raw)
        elif kind in _EACH_STEP:
            self.steps.setdefault(raw.get("step", raw.get("forward", 0)), []).append(raw)
        elif kind == "clocks" and raw.get("total"):
            self.at_a_time = max(self.at_a_time, len(raw["total"]))
            for index in range(len(raw["total"])):
                self.clocks[raw["step"] + index] = [raw[name][index] for name in CLOCKS]
        elif kind == "epoch":
            self.epoch = raw
        elif kind in ("clocks", "end"):
            self.last.append(raw)

    def whole_steps(self) -> set[int]:
        """Steps with all records. Profiled steps, for example, have no sketches."""
        kinds = {step: {raw["kind"] for raw in raws} for step, raws in self.steps.items()}
        return {step for step in self.clocks if kinds.get(step, set()) >= _ALWAYS}

    def find(self, step: int, kind: str, stage: str | None = None) -> Raw:
        return next(raw for raw in self.steps[step] if raw["kind"] == kind and raw.get("stage") == stage)


class Seed:
    """All ranks of a healthy run of one module and one optimizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: Raw = json.loads((path / "run.json").read_text())
        self.node = [json.loads(line) for line in min(path.glob("node-*.jsonl")).read_text().splitlines()]
        self.ranks = [_read(file) for file in sorted(path.glob("rank-*.jsonl"))]

    @cached_property
    def steps(self) -> list[int]:
        """Steps for which every rank has all records."""
        common = set.intersection(*(rank.whole_steps() for rank in self.ranks))
        return [step for step in sorted(common) if step >= _WARM_UP]

    @cached_property
    def module(self) -> ModuleRecord:
        raw = next(raw for raw in self.ranks[0].once if raw["kind"] == "module")
        record = from_mapping(raw)
        assert isinstance(record, ModuleRecord)
        return record

    def local(self, step: int) -> list[Sketches]:
        return [Sketches.read(rank.find(step, "backward")["local"]) for rank in self.ranks]

    def reduced_codes(self, step: int, shares: dict[int, tuple[int, ...]], columns: int) -> Array:
        """The norms of all reduced gradients, of which each rank recorded some."""
        codes = self.local(step)[0].codes.copy()
        assert len(codes) == columns
        for number, rank in enumerate(self.ranks):
            recorded = Sketches.read(rank.find(step, "backward")["reduced"]).codes
            codes[list(shares[number])] = recorded
        return codes

    @cached_property
    def step_us(self) -> float:
        """Median duration of a step, including ddpcheck's own work."""
        took = sorted(
            rank.clocks[step][0] + max(0, rank.clocks[step][6]) for rank in self.ranks for step in self.steps
        )
        return float(took[len(took) // 2])


def _read(file: Path) -> SeedRank:
    rank = SeedRank()
    reading = RecordFile(file)
    while found := reading.read():
        for record in found:
            rank.add(to_mapping(record))
    return rank

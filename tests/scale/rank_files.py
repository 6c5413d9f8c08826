"""Writes the record files of all ranks, in blocks of steps."""

from __future__ import annotations

import base64
import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ddpcheck.records.codecs import distribute, shares
from ddpcheck.records.reader import parse
from tests.helpers.block_runs import block_file
from tests.scale.epochs import Epochs
from tests.scale.lines import Raw, digits, form_of, line_of
from tests.scale.plan import Plan
from tests.scale.seed import CLOCKS, Seed
from tests.scale.sketches import Sketches, mean_of, spread

# Steps that are generated for all ranks before they are written.
_BLOCK = 40
_SECONDS_BEFORE = 3.0


@dataclass(frozen=True)
class Step:
    """What all ranks share at a step, and the sketches of each rank."""

    number: int
    seed_step: int
    root: str
    leaves: str
    outlier_root: str
    outlier_leaves: str
    gradients: str
    buffers: str
    local: list[str]
    reduced: dict[int, str]


class RankFiles:
    """Generates all files; `begin` is the time of the first step."""

    def __init__(self, seed: Seed, plan: Plan, folder: Path, begin: float) -> None:
        self._seed, self._plan, self._folder, self._begin = seed, plan, folder, begin
        self._longer = round(plan.slow_by * seed.step_us) if plan.slow_node is not None else 0
        self.step_seconds = (seed.step_us + self._longer) / 1e6
        self._draw = np.random.default_rng(plan.seed)
        # The clocks of hosts differ by some milliseconds, and each rank has some jitter.
        self.offsets = [0.0, *self._draw.normal(0, 0.003, plan.nodes - 1)]
        self._epochs = Epochs(seed, plan)
        self._dealt = _indices(seed, plan.ranks)
        self._forms = [
            {step: [form_of(raw) for raw in rank.steps[step]] for step in seed.steps} for rank in seed.ranks
        ]
        self._widths = {step: seed.ranks[0].find(step, "digest", "params")["width"] for step in seed.steps}
        self._buffer_leaves = _text(_leaves(plan.seed, -1, len(seed.module.buffers), 1))

    def write(self) -> None:
        for rank in range(self._plan.ranks):
            self._append(rank, self._head(rank))
        for first in range(0, self._plan.steps, _BLOCK):
            steps = [self._step(number) for number in range(first, min(self._plan.steps, first + _BLOCK))]
            jitter = self._draw.gamma(2.0, 0.0001, (self._plan.ranks, len(steps)))
            for rank in range(self._plan.ranks):
                lines = [self._lines(rank, step, jitter[rank, index]) for index, step in enumerate(steps)]
                self._append(rank, "".join(lines))
        for rank in range(self._plan.ranks):
            self._append(rank, self._tail(rank))

    def ends_at(self, rank: int) -> float:
        return self._time(rank, self._plan.steps) + 0.5

    def _time(self, rank: int, steps: float) -> float:
        return self._begin + steps * self.step_seconds + self.offsets[self._plan.node_of(rank)]

    def _append(self, rank: int, text: str) -> None:
        data = text.encode()
        if self._plan.blocks:
            records = [record for record in map(parse, data.splitlines()) if record is not None]
            data = block_file(records, 2 * len(records) + 2, random.Random(rank)) if records else b""
        with (self._folder / f"rank-{rank:05d}.jsonl").open("ab") as file:
            file.write(data)

    def _head(self, rank: int) -> str:
        once = self._seed.ranks[rank % len(self._seed.ranks)].once
        began = next(raw["time"] for raw in once if raw["kind"] == "rank")
        return "".join(line_of(self._placed(rank, raw, began)) for raw in once)

    def _placed(self, rank: int, raw: Raw, began: float) -> Raw:
        plan = self._plan
        changed: Raw = {}
        if "time" in raw:
            changed["time"] = round(raw["time"] - began + self._time(rank, 0) - _SECONDS_BEFORE, 4)
        if raw["kind"] == "rank":
            node = plan.node_of(rank)
            local = rank % plan.per_node
            changed |= {"rank": rank, "local_rank": local, "world_size": plan.ranks, "host": plan.host(node)}
            changed |= {"pid": plan.pid(rank), "ticks": 1000, "session": digits(32, "session", plan.seed)}
            changed["environment"] = {**raw.get("environment", {}), **self._environment(rank)}
        elif raw["kind"] == "module":
            changed["group"] = list(range(plan.ranks))
        elif raw["kind"] == "loader":
            changed |= self._epochs.loader(rank)
        return {**raw, **changed}

    def _environment(self, rank: int) -> dict[str, str]:
        plan = self._plan
        node = plan.node_of(rank)
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": plan.ranks,
            "LOCAL_RANK": rank % plan.per_node,
            "LOCAL_WORLD_SIZE": len(plan.ranks_of(node)),
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": plan.nodes,
        }
        return {name: str(number) for name, number in numbers.items()}

    def _step(self, number: int) -> Step:
        seed, plan = self._seed, self._plan
        seed_step = seed.steps[number % len(seed.steps)]
        local = spread(seed.local(seed_step), plan.ranks, self._draw)
        columns = local.codes.shape[1]
        mean = mean_of(local, seed.reduced_codes(seed_step, shares(seed.module), columns))
        width = self._widths[seed_step]
        leaves = _leaves(plan.seed, number, columns, width)
        # At first one tensor differs; a step later all of them do.
        others = _leaves(plan.seed, -1 - number, columns, width)
        outlier = others[:width] + leaves[width:] if number == plan.outlier_step else others
        return Step(
            number,
            seed_step,
            root=digits(32, "params", number),
            leaves=_text(leaves),
            outlier_root=digits(32, "outlier params", number),
            outlier_leaves=_text(outlier),
            gradients=digits(32, "gradients", number),
            buffers=digits(32, "buffers", number),
            local=local.texts(),
            reduced={
                rank: Sketches(mean.codes[None, indices], mean.steps[None, indices]).texts()[0]
                for rank, indices in self._dealt.items()
                if indices
            },
        )

    def _lines(self, rank: int, step: Step, jitter: float) -> str:
        plan, number = self._plan, step.number
        outlier = rank == plan.outlier_rank and number >= plan.outlier_step
        fields: dict[str, object] = {
            "number": number + 1,
            "step": number,
            "local": step.local[rank],
            "reduced": step.reduced.get(rank, ""),
            "digest": digits(12, "batch", rank, number),
        }
        gradients = {**fields, "root": step.gradients[:16], "time": self._time(rank, number + 0.7) + jitter}
        applied = {**fields, "root": step.gradients}
        params = {
            **fields,
            "root": step.outlier_root if outlier else step.root,
            "leaves": step.outlier_leaves if outlier else step.leaves,
            "time": self._time(rank, number + 1) + jitter,
            "forward": number + 1,
        }
        buffers = {**params, "root": step.buffers, "leaves": self._buffer_leaves}
        batch = {**fields, "forward": number}
        by_kind = {
            "backward": gradients,
            "applied": applied,
            "digest": params,
            "batch": batch,
            "memory": batch,
        }
        which = rank % len(self._forms)
        raws = self._seed.ranks[which].steps[step.seed_step]
        forms = self._forms[which][step.seed_step]
        lines = [
            form % (buffers if raw.get("of") == "buffers" else by_kind[raw["kind"]])
            for raw, form in zip(raws, forms, strict=True)
        ]
        return "".join([*lines, self._clocks(rank, number), self._epochs.line(rank, number)])

    def _clocks(self, rank: int, number: int) -> str:
        """One record for several steps, written after the last of them."""
        every = self._seed.ranks[0].at_a_time
        last = number == self._plan.steps - 1
        if number == 0 or ((number + 1) % every and not last):
            return ""
        first = max(1, number // every * every)
        rows = [self._clock(rank, step) for step in range(first, number + 1)]
        columns = dict(zip(CLOCKS, map(list, zip(*rows, strict=True)), strict=True))
        return line_of({"kind": "clocks", "step": first, **columns})

    def _clock(self, rank: int, number: int) -> list[int]:
        """Takes the times of the seed's ranks in turn, so that no rank is a straggler."""
        seed = self._seed
        source = seed.ranks[(rank + number) % len(seed.ranks)]
        row = dict(zip(CLOCKS, source.clocks[seed.steps[number % len(seed.steps)]], strict=True))
        row["total"] += self._longer
        row["backward" if self._plan.is_slow(rank) else "wait"] += self._longer
        return list(row.values())

    def _tail(self, rank: int) -> str:
        last = self._seed.ranks[rank % len(self._seed.ranks)].last
        ended = round(self.ends_at(rank), 6)
        return "".join(line_of({**raw, "time": ended} if raw["kind"] == "end" else raw) for raw in last)


def _indices(seed: Seed, ranks: int) -> dict[int, list[int]]:
    sizes = tuple(int(np.prod(row[2])) for row in seed.module.parameters)
    return {rank: list(indices) for rank, indices in enumerate(distribute(sizes, ranks))}


@lru_cache(maxsize=4)
def _leaves(seed: int, number: int, columns: int, width: int) -> bytes:
    return hashlib.shake_128(repr((seed, number)).encode()).digest(columns * width)


def _text(leaves: bytes) -> str:
    return base64.b64encode(leaves).decode()

"""Sketches gradients that FSDP2 reduces: whole ones before the reduction, and this rank's shards of the result.

Every shard is sketched by itself and enters with the weight of its position in the whole gradient. So the sketch of a
whole gradient is a sum over shards, of which each rank contributes its own after the reduction.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ddpcheck.probes.probe import BudgetItem, Probe, ProbeContext
from ddpcheck.probes.scan.scanner import Scan, TensorScanner, sketch_text
from ddpcheck.probes.scan.table import NUMBERS
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.shards import ReducedShardsRecord, ShardReductionRecord
from ddpcheck.records.sketch_signs import weight

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.shard_reduction import ReducedParameter, ShardReduction
    from ddpcheck.config import Config

# The first steps, in which most faults appear, and then one of so many.
FIRST_STEPS = 8
SKETCHED_EVERY = 16
# Shards that are sketched in one backward. With more, the parameters take turns from step to step.
MOST_PARTS = 4096


class SketchedRows(NamedTuple):
    """Consecutive rows of a scan: one for each shard of a gradient, or one shard."""

    scan: Scan
    first: int
    rows: int = 1


@dataclass
class ReducedGradient:
    """What is known of one parameter in a backward."""

    # Its number in the records.
    index: int
    # Whole gradients of this rank that enter the result, shard by shard: more than one if earlier ones were kept back.
    local: list[SketchedRows] = field(default_factory=list)
    # The shard before the reduction, to which the result is added, and after it.
    before: SketchedRows | None = None
    after: SketchedRows | None = None


class ShardReductionProbe(Probe):
    """Two passes over the gradients in the steps that it sketches: the whole local ones, and the shards."""

    name = "shard_reduction"
    budget_items: ClassVar[Mapping[str, BudgetItem]] = {
        "shards_reducing": BudgetItem.SKETCH,
        "shards_reduced": BudgetItem.SKETCH,
    }
    # Once FSDP has reduced a gradient.
    on_demand: ClassVar[frozenset[str]] = frozenset({"after_step"})

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.gradients != "off"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._follows_steps = False
        self._step = 0
        # Numbers of parameters in the records, by what describes them there.
        self._indices: dict[tuple[object, ...], int] = {}
        # By name, the ids of the parameters that have it.
        self._named: dict[str, list[int]] = {}
        self._scanners: dict[tuple[object, ...], TensorScanner] = {}
        # Gradients of this backward, with their parameters, by number; and those that FSDP keeps for the next one.
        self._reduced: dict[int, tuple[ReducedGradient, ReducedParameter]] = {}
        self._kept: dict[int, list[SketchedRows]] = {}
        self._incomplete: set[int] = set()
        self._pending: deque[list[ReducedGradient]] = deque()
        self._steps_of_pending: deque[int] = deque()

    def after_step(self, optimizer: object) -> None:
        modules = getattr(optimizer, "modules", ())
        if any(tracked.role is ModuleRole.SHARDED for tracked in modules):
            self._step = max(self._step, getattr(optimizer, "steps", 0) + 1)
            self._kept.clear()
        if self._pending:
            self._drain()

    after_side_step = after_step

    def _is_sketched(self) -> bool:
        every = max(SKETCHED_EVERY, self.context.config.sketch_every)
        chosen = self._step < FIRST_STEPS or self._step % every == 0
        return chosen and self.context.budget.runs(BudgetItem.SKETCH, self._step)

    def shards_reducing(self, reduction: ShardReduction) -> None:
        if not self._follows_steps:
            self._follows_steps = True
            self.context.call(self, Probe.after_step)
        if not self._is_sketched():
            return
        chosen = self._chosen(reduction)
        if not chosen:
            return
        parts: list[torch.Tensor | None] = []
        spans = []
        for index, parameter in chosen:
            begin = len(parts)
            parts += parameter.parts()
            spans.append((index, begin, len(parts) - begin))
        scan = self._scan("local", reduction, parts)
        new = [(index, parameter) for index, parameter in chosen if index not in self._reduced]
        earlier = [parameter.shard_gradient() for _, parameter in new]
        before = self._scan("before", reduction, earlier) if any(e is not None for e in earlier) else None
        for row, (index, parameter) in enumerate(new):
            entry = ReducedGradient(index, list(self._kept.pop(index, ())))
            if before is not None and earlier[row] is not None:
                entry.before = SketchedRows(before, row)
            self._reduced[index] = entry, parameter
        for index, begin, count in spans:
            self._reduced[index][0].local.append(SketchedRows(scan, begin, count))
            (self._incomplete.discard if reduction.complete else self._incomplete.add)(index)

    def _chosen(self, reduction: ShardReduction) -> list[tuple[int, ReducedParameter]]:
        parts = sum(parameter.shards for parameter in reduction.parameters)
        stride = -(-parts // MOST_PARTS)
        numbered = [(self._index(reduction, each), each) for each in reduction.parameters]
        return [pair for pair in numbered if (pair[0] + self._step) % stride == 0] if stride > 1 else numbered

    def _index(self, reduction: ShardReduction, parameter: ReducedParameter) -> int:
        sharded = id(parameter.sharded)
        key = (
            sharded,
            parameter.name,
            parameter.shards,
            parameter.dtypes,
            reduction.divisor,
            reduction.custom,
        )
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._indices)
            # Several models without a common root have parameters of the same name.
            known = self._named.setdefault(parameter.name, [])
            if sharded not in known:
                known.append(sharded)
            number = known.index(sharded)
            self.context.write(
                ReducedShardsRecord(
                    index=index,
                    name=f"{parameter.name} ({number + 1})" if number else parameter.name,
                    dtypes=list(parameter.dtypes),
                    numel=parameter.gradient.numel(),
                    shards=parameter.shards,
                    position=parameter.position,
                    ranks=list(reduction.ranks),
                    divisor=reduction.divisor,
                    custom=reduction.custom,
                )
            )
        return index

    def _scan(
        self, what: str, reduction: ShardReduction | None, tensors: Sequence[torch.Tensor | None]
    ) -> Scan:
        """Lists that come again at each step have a scanner of their own."""
        names = () if reduction is None else tuple(each.name for each in reduction.parameters)
        scanner = self._scanners.get((what, names, len(tensors)))
        if scanner is None:
            scanner = self._scanners[what, names, len(tensors)] = TensorScanner()
        scanner.update(tensors)
        return scanner.scan(tensors, sketch=b"\1" * len(tensors))

    def shards_reduced(self) -> None:
        reduced, self._reduced = self._reduced, {}
        complete = []
        for index, (entry, parameter) in reduced.items():
            if index in self._incomplete:
                self._kept[index] = entry.local
            else:
                complete.append((entry, parameter))
        if not complete:
            return
        shards = [parameter.shard_gradient() for _, parameter in complete]
        after = self._scan("after", None, shards)
        entries = []
        for row, (entry, _) in enumerate(complete):
            # Without a gradient, something has taken it away already.
            if shards[row] is not None:
                entry.after = SketchedRows(after, row)
                entries.append(entry)
        if entries:
            self._pending.append(entries)
            self._steps_of_pending.append(self._step)
        self._drain()

    def before_exit(self) -> None:
        self._drain(wait=True)

    def _drain(self, wait: bool = False) -> None:
        """Hand on what has arrived from a device; never waits in the training loop."""
        while self._pending and (wait or _ready(self._pending[0])):
            entries, step = self._pending.popleft(), self._steps_of_pending.popleft()
            for scan in _scans(entries):
                # Complete from here on: only the writer's thread reads it.
                scan.numbers()
            self.context.write_later(lambda entries=entries, step=step: _record(entries, step))  # type: ignore[misc]


def _scans(entries: Sequence[ReducedGradient]) -> set[Scan]:
    parts = [part for entry in entries for part in (*entry.local, entry.before, entry.after)]
    return {part.scan for part in parts if part is not None}


def _ready(entries: Sequence[ReducedGradient]) -> bool:
    return all(scan.ready() for scan in _scans(entries))


def _record(entries: Sequence[ReducedGradient], step: int) -> ShardReductionRecord:
    before = [entry for entry in entries if entry.before is not None]
    return ShardReductionRecord(
        step=step,
        indices=[entry.index for entry in entries],
        local=_text([_sum(entry.local) for entry in entries]),
        reduced=_text([_shard(entry.after) for entry in entries]),
        kept=[entry.index for entry in before],
        before=_text([_shard(entry.before) for entry in before]),
    )


def _text(sketches: Sequence[tuple[float, float, float]]) -> str:
    return sketch_text(array("d", [number for sketch in sketches for number in sketch]))


def _shard(part: SketchedRows | None) -> tuple[float, float, float]:
    if part is None:
        return 0.0, 0.0, 0.0
    value, norm, nonfinite = part.scan.numbers()[NUMBERS * part.first : NUMBERS * (part.first + 1)]
    return value, norm, nonfinite


def _sum(parts: Sequence[SketchedRows]) -> tuple[float, float, float]:
    """The sketch of whole gradients, added up: their shards with the weights of their shards."""
    value, norm, nonfinite = 0.0, 0.0, 0.0
    for part in parts:
        numbers = part.scan.numbers()[NUMBERS * part.first : NUMBERS * (part.first + part.rows)]
        value += sum(weight(position) * each for position, each in enumerate(numbers[::NUMBERS]))
        norm += math.hypot(*numbers[1::NUMBERS])
        nonfinite += sum(numbers[2::NUMBERS])
    return value, norm, nonfinite

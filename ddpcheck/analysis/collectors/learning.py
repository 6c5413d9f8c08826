"""Collects which parameters have never changed although optimizers step them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.gradients import BackwardRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_columns import Stream
    from ddpcheck.analysis.aggregate.step_window import Window

# Bytes of each digest that are compared: those that the records of steps have.
_WIDTH = 2
_PARAMETERS, _PARAMS = TensorKind.PARAMETERS.value, Stage.PARAMS.value
_INIT_BEFORE = Stage.INIT_BEFORE.value


@dataclass
class Changes:
    """The parameters of one module on the first rank of its group."""

    # Digests after wrapping, until all parameters have changed.
    first: list[bytes] = field(default_factory=list)
    root: str = ""
    # Indices of parameters that have changed; `lost`: the list of parameters did, so indices mean something else.
    changed: set[int] = field(default_factory=set)
    lost: bool = False
    # Digests after a step, by optimizer.
    steps: Counter[int] = field(default_factory=Counter)
    # Reduced backwards, and indices of parameters without a gradient in any of them.
    backwards: int = 0
    absent: set[int] = field(default_factory=set)

    def add(self, record: DigestRecord) -> None:
        if record.stage == _PARAMS:
            self.steps[-1 if record.optimizer is None else record.optimizer] += 1
        if self.lost or record.root == self.root or (self.first and len(self.changed) == len(self.first)):
            return
        self.root = record.root
        leaves = [leaf[:_WIDTH] for leaf in unpack_leaves(record.leaves, record.width)]
        if not self.first:
            self.first = leaves
        elif len(leaves) != len(self.first):
            self.lost = True
        else:
            pairs = enumerate(zip(self.first, leaves, strict=True))
            self.changed.update(index for index, (before, now) in pairs if before != now)

    @property
    def unchanged(self) -> set[int]:
        return set() if self.lost else set(range(len(self.first))) - self.changed


class LearningCollector(Collector):
    """Of one rank per module: replicas agree, or another rule reports it."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.modules: dict[ModuleKey, Changes] = {}

    def add_window(self, window: Window) -> None:
        for stream in window.of(BackwardRecord):
            changes = self.modules.setdefault(stream.module, Changes())
            # The backwards of a window have no absent gradients.
            changes.absent = set()
            changes.backwards += len(stream)
        for stream in window.of(DigestRecord):
            if stream.constants["of"] == _PARAMETERS:
                self._add_digests(stream)

    def _add_digests(self, stream: Stream) -> None:
        changes = self.modules.setdefault(stream.module, Changes())
        if changes.lost or (changes.first and len(changes.changed) == len(changes.first)):
            optimizer = stream.constants["optimizer"]
            changes.steps[-1 if optimizer is None else optimizer] += len(stream)
            return
        first = next(index for index, rank in enumerate(stream.ranks) if rank.number == stream.module[0][0])
        for record in stream.records_of(first):
            changes.add(cast("DigestRecord", record))

    @collects_per_module(DigestRecord)
    def add(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if record.of == _PARAMETERS and record.stage != _INIT_BEFORE and rank.number == module[0][0]:
            self.modules.setdefault(module, Changes()).add(record)

    @collects_per_module(BackwardRecord)
    def add_backward(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        if rank.number != module[0][0]:
            return
        changes = self.modules.setdefault(module, Changes())
        absent = set(record.absent)
        changes.absent = absent if not changes.backwards else changes.absent & absent
        changes.backwards += 1

"""The steps of one run over all ranks: gradients, batches and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.diff.record_diff import local_sketches, reduced_sketches
from ddpcheck.diff.run_input import RunInput
from ddpcheck.records.codecs import Packed, shares
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.kinds.modules import HyperRecord, ModuleRecord, OptimizerRecord

# Records of a step may be written up to this many steps later.
LATE = 16
ModuleKey = tuple[tuple[int, ...], int]


@dataclass
class RankStepRecord:
    """One rank's step of one module."""

    step: int
    backward: BackwardRecord | None = None
    rows: int = 0
    forwards: int = 0
    moved: bool = False
    rewritten: bool = False
    # By optimizer.
    hyper: dict[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStep:
    """One step over all ranks that recorded it."""

    step: int
    ranks: Mapping[int, RankStepRecord]
    # By parameter: the reduced gradient, and the ranks' own ones.
    reduced: Mapping[str, Packed]
    local: Mapping[str, Mapping[int, Packed]]

    def size(self, name: str) -> float:
        """The mean of the ranks' norms, to which rounding is relative."""
        parts = [one.norm for one in self.local.get(name, {}).values() if one.known]
        return sum(parts) / len(parts) if parts else 0.0

    def rows(self) -> int:
        return sum(one.rows for one in self.ranks.values())


def run_steps(run: RunInput, module: ModuleRecord) -> Iterator[RunStep]:
    """Steps in order; only a few steps of each file are in memory."""
    key = (tuple(module.group), module.ordinal)
    names = [str(row[0]) for row in module.parameters]
    streams = {rank: _rank_steps(run, rank, key) for rank in module.group if rank in run.files}
    heads = {rank: step for rank, stream in streams.items() if (step := next(stream, None)) is not None}
    while heads:
        number = min(head.step for head in heads.values())
        taking = {rank: head for rank, head in heads.items() if head.step == number}
        yield _combined(number, taking, names, shares(module))
        for rank in taking:
            following = next(streams[rank], None)
            if following is None:
                del heads[rank]
            else:
                heads[rank] = following


def _combined(
    step: int, ranks: dict[int, RankStepRecord], names: list[str], shares_by_rank: dict[int, tuple[int, ...]]
) -> RunStep:
    reduced: dict[str, Packed] = {}
    local: dict[str, dict[int, Packed]] = {}
    for rank, one in ranks.items():
        if one.backward is not None:
            reduced.update(reduced_sketches(one.backward, names, shares_by_rank.get(rank, ())))
            for name, sketch in local_sketches(one.backward, names).items():
                local.setdefault(name, {})[rank] = sketch
    return RunStep(step, ranks, reduced, local)


def _rank_steps(run: RunInput, rank: int, key: ModuleKey) -> Iterator[RankStepRecord]:
    number = -1
    hyper: dict[int, dict[str, Any]] = {}
    steps: dict[int, RankStepRecord] = {}

    def at(step: int) -> RankStepRecord:
        return steps.setdefault(step, RankStepRecord(step))

    for record in run.records(rank):
        match record:
            case ModuleRecord() if (tuple(record.group), record.ordinal) == key:
                number = record.module
            case OptimizerRecord():
                hyper[record.optimizer] = {**hyper.get(record.optimizer, {}), "class": record.name}
            case HyperRecord():
                hyper[record.optimizer] = {**hyper.get(record.optimizer, {}), **record.changed}
            case BackwardRecord() if record.module == number and record.local:
                # The last backward of a step holds the accumulated gradients.
                at(record.step).backward = record
            case AppliedRecord() if record.module == number:
                at(record.step).moved = record.moved
            case BatchRecord() if record.module == number:
                one = at(record.forward if record.step is None else record.step)
                one.rows += record.rows
                one.forwards += 1
            case DigestRecord() if record.module == number and record.stage == Stage.REWRITTEN.value:
                at(record.step).rewritten = True
            case DigestRecord() if record.module == number and record.stage == Stage.PARAMS.value:
                if record.optimizer is not None:
                    at(record.step).hyper[record.optimizer] = hyper.get(record.optimizer, {})
                # Batches are recorded after their step, and gradients of a device arrive late.
                for done in sorted(step for step in steps if step < record.step - LATE):
                    yield steps.pop(done)
    for done in sorted(steps):
        yield steps.pop(done)

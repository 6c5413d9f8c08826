"""The memory table, one row per rank; ranks with more memory than others; memory that options would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.memory.collector import RankMemory
from ddpcheck.analysis.timeseries.series import Series

LEAST_STEPS = 20
# A rank is uneven if it exceeds the median by this share and by this many bytes. The limit for host memory is larger:
# a rank with additional tasks often needs more of it.
UNEVEN_SHARE = 0.25
UNEVEN_ON_DEVICE, UNEVEN_ON_HOST = 256 << 20, 512 << 20

PARTS = ("parameters", "gradients", "buckets", "state", "buffers")


@dataclass(frozen=True)
class UnevenRank:
    """A rank with more memory than the others."""

    rank: int
    level: int
    usual: int
    # The part that accounts for most of the difference; empty for none.
    part: str


def uneven_ranks(ranks: Mapping[int, RankMemory], sharded: bool) -> list[UnevenRank]:
    """`sharded`: optimizer state is sharded over ranks, so its size differs."""
    settled = {rank: memory for rank, memory in ranks.items() if memory.steps >= LEAST_STEPS}
    if len(settled) < 2 or len(settled) < len(ranks) or len({m.on_device for m in settled.values()}) > 1:
        return []
    levels = {rank: _level(memory, sharded) for rank, memory in settled.items()}
    usual = median_low(levels.values())
    least = UNEVEN_ON_DEVICE if next(iter(settled.values())).on_device else UNEVEN_ON_HOST
    bound = usual + max(least, UNEVEN_SHARE * usual)
    return [
        UnevenRank(rank, level, usual, _part(settled, rank, level - usual))
        for rank, level in sorted(levels.items())
        if level >= bound
    ]


def _level(memory: RankMemory, sharded: bool) -> int:
    return memory.level - (memory.part("state") if sharded else 0)


def _part(ranks: Mapping[int, RankMemory], rank: int, excess: int) -> str:
    for name in PARTS:
        usual = median_low(memory.part(name) for memory in ranks.values())
        if ranks[rank].part(name) - usual > excess / 2:
            return "optimizer state" if name == "state" else name
    return ""


_ZERO = "ZeroRedundancyOptimizer"


def has_sharded_state(attempt: Attempt) -> bool:
    """Whether an optimizer shards its state. Decided by its class, not by the sizes, which may differ otherwise."""
    return any(record.name == _ZERO for rank in attempt.ranks.values() for record in rank.optimizers.values())


# Smaller savings, in bytes and as a share of the rank's peak memory, are not reported.
LEAST_SAVING = 64 << 20
LEAST_SAVING_SHARE = 0.05
# Gradients count as kept if at least this share still existed when the next backward began.
LEAST_KEPT_SHARE = 0.5


@dataclass(frozen=True)
class Saving:
    """Memory that one option saves."""

    option: str
    bytes: int
    how: str


def savings_of(memory: RankMemory, group_size: int, sharded: bool, hooked: bool) -> list[Saving]:
    """Savings of one rank, the largest first. `hooked`: a communication hook handles the gradients."""
    gradients, buckets, state = memory.part("gradients"), memory.part("buckets"), memory.part("state")
    savings = []
    if not memory.views and group_size > 1 and not hooked:
        size = min(gradients, buckets)
        how = "gradients are views of DDP's buckets instead of copies"
        savings.append(Saving("gradient_as_bucket_view=True", size, how))
    kept = memory.part("kept")
    if kept >= LEAST_KEPT_SHARE * gradients:
        how = "zero_grad(set_to_none=True) before the forward frees the gradients while activations exist"
        savings.append(Saving("set_to_none=True", kept, how))
    if not sharded and group_size > 1:
        size = state - state // group_size
        savings.append(
            Saving("ZeroRedundancyOptimizer", size, f"each of {group_size} ranks keeps a share of the state")
        )
    least = max(LEAST_SAVING, LEAST_SAVING_SHARE * memory.most)
    return sorted((saving for saving in savings if saving.bytes >= least), key=lambda saving: -saving.bytes)


MOST_RANKS = 256
# Points of each curve.
MOST_POINTS = 64


class RankMemoryRow(TypedDict):
    """A row of the table, in bytes."""

    rank: int
    device: str
    # "allocated": torch's statistics of its device; "resident": anonymous memory of the process.
    measured: str
    steps: int
    # Before wrapping, without the weights: interpreter, libraries, data.
    before: int
    parameters: int
    buffers: int
    # 0 for views of the buckets.
    gradients: int
    gradients_in_buckets: bool
    buckets: int
    optimizer_state: int
    # Everything else when the backward begins: mostly activations.
    rest: int
    after_step: int
    most: int
    # Reserved by torch on its device.
    reserved: int
    # Bytes per step, if memory grows steadily.
    growth: float | None
    # Memory on other devices than its own, by device.
    elsewhere: dict[str, int]
    # [step, bytes after the step]
    curve: list[list[int]]


class MemoryTable(TypedDict):
    """The contents of `memory` in report.json."""

    # All ranks; in very large jobs those with growing memory and those with the highest peak.
    ranks: list[RankMemoryRow]
    of: int


def memory_table(attempt: Attempt) -> MemoryTable | None:
    """None where no rank recorded a step."""
    memories = {rank: memory for rank, memory in attempt.memory.ranks.items() if memory.steps}
    if not memories:
        return None
    ordered = sorted(memories, key=lambda rank: (memories[rank].growth() is None, -memories[rank].most, rank))
    rows = [_row(rank, memories[rank]) for rank in sorted(ordered[:MOST_RANKS])]
    return MemoryTable(ranks=rows, of=len(memories))


def _row(rank: int, memory: RankMemory) -> RankMemoryRow:
    growth = memory.growth()
    parts = {name: memory.part(name) for name in ("parameters", "buffers", "gradients", "buckets", "state")}
    # When the backward begins there are no gradients, unless they were kept.
    known = memory.base + sum(parts.values()) - parts["gradients"] + memory.part("kept")
    return RankMemoryRow(
        rank=rank,
        device=memory.device,
        measured="allocated" if memory.on_device else "resident",
        steps=memory.steps,
        before=memory.base,
        parameters=parts["parameters"],
        buffers=parts["buffers"],
        gradients=parts["gradients"],
        gradients_in_buckets=memory.views,
        buckets=parts["buckets"],
        optimizer_state=parts["state"],
        rest=max(0, memory.level_in_backward - known) if memory.parts else 0,
        after_step=memory.level,
        most=memory.most,
        reserved=memory.reserved,
        growth=None if growth is None else round(growth.per_step),
        elsewhere=memory.elsewhere(),
        curve=curve(memory.after),
    )


def curve(series: Series) -> list[list[int]]:
    """Downsampled to the limit of points, including the first and the last."""
    points = [[step, value] for step, value in series]
    if len(points) <= MOST_POINTS:
        return points
    spacing = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(number * spacing)] for number in range(MOST_POINTS)]

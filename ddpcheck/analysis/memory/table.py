"""The memory table: one row per rank."""

from __future__ import annotations

from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.memory.collector import RankMemory
from ddpcheck.analysis.timeseries.series import Series

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

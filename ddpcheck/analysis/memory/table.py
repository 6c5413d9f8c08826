"""The ranks' memory as reports show it."""

from __future__ import annotations

from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.memory.collector import RankMemory
from ddpcheck.analysis.timeseries.series import Series

MOST_RANKS = 256
# Points of each curve; more than that nobody can see.
MOST_POINTS = 64


class RankMemoryRow(TypedDict):
    """A row of the table, in bytes."""

    rank: int
    device: str
    # Whether the figures are torch's of its device, or the process's own pages on the host.
    measured: str
    steps: int
    # Beside the weights, when it came to be wrapped: interpreter, libraries, data.
    before: int
    parameters: int
    buffers: int
    # Views of the buckets hold nothing of their own.
    gradients: int
    gradients_in_buckets: bool
    buckets: int
    optimizer_state: int
    # As the backward begins, beyond all of these: activations above all.
    rest: int
    after_step: int
    most: int
    # On a device, what torch took from it.
    reserved: int
    # Bytes a step, where it grows steadily.
    growth: float | None
    # By device, what lies on others than its own.
    elsewhere: dict[str, int]
    # [step, bytes after the step]
    curve: list[list[int]]


class MemoryTable(TypedDict):
    """What report.json holds under `memory`."""

    # All, or of very many those that grow, and those that held the most.
    ranks: list[RankMemoryRow]
    of: int


def memory_table(attempt: Attempt) -> MemoryTable | None:
    """None where no step was seen."""
    seen = {rank: memory for rank, memory in attempt.memory.ranks.items() if memory.steps}
    if not seen:
        return None
    ordered = sorted(seen, key=lambda rank: (seen[rank].growth() is None, -seen[rank].most, rank))
    rows = [_row(rank, seen[rank]) for rank in sorted(ordered[:MOST_RANKS])]
    return MemoryTable(ranks=rows, of=len(seen))


def _row(rank: int, memory: RankMemory) -> RankMemoryRow:
    growth = memory.growth()
    parts = {name: memory.part(name) for name in ("parameters", "buffers", "gradients", "buckets", "state")}
    # Gradients are not there when the backward begins, unless they were kept.
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
    """So many points of it as can be drawn, the first and the last among them."""
    points = [[step, value] for step, value in series]
    if len(points) <= MOST_POINTS:
        return points
    apart = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(number * apart)] for number in range(MOST_POINTS)]

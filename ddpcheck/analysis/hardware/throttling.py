"""Throttling as the cause of a straggler: its GPU was throttled by heat or power, those of the others were not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.statistics import GpuStatistics

# Minimum number of samples during the steps, and minimum share of throttled ones.
FEWEST_SAMPLES = 4
LEAST_SHARE = 0.5
# The others may be throttled as well, as under a power cap, but in at most half as many samples.
MOST_OF_OTHERS = 0.5
# Minimum ratio of the clocks.
MOST_OF_CLOCK = 0.97


@dataclass(frozen=True)
class Throttling:
    """GPUs of stragglers during the steps."""

    # Share of samples by reason, the maximum over the stragglers' GPUs.
    reasons: Mapping[str, float]
    # Host and index, as "node1:3".
    gpus: tuple[str, ...]
    # Mean clock in MHz of these GPUs and of the others; None if unknown.
    clock: float | None
    others_clock: float | None


@dataclass(frozen=True)
class _RankGpu:
    """A GPU that a rank's process uses."""

    name: str
    statistics: GpuStatistics

    @property
    def share(self) -> float:
        return max(self.statistics.throttling().values(), default=0.0)

    @property
    def clock(self) -> float | None:
        row = self.statistics.clock.row()
        return None if row is None else row["mean"]


def throttled(
    nodes: Sequence[NodeSamples], late: Collection[int], group: Collection[int]
) -> Throttling | None:
    """None if throttling is not the cause, or unknown for a rank of the group."""
    gpus_of_rank = {rank: _rank_gpus(nodes, rank) for rank in group}
    if not all(gpus_of_rank.values()):
        return None
    theirs = [gpu_of_rank for rank in late for gpu_of_rank in gpus_of_rank[rank]]
    others = [gpu_of_rank for rank in group if rank not in late for gpu_of_rank in gpus_of_rank[rank]]
    least = min((max(gpu_of_rank.share for gpu_of_rank in gpus_of_rank[rank]) for rank in late), default=0.0)
    if (
        least < LEAST_SHARE
        or max((gpu_of_rank.share for gpu_of_rank in others), default=1.0) > MOST_OF_OTHERS * least
    ):
        return None
    clock, usual = _clock(theirs), _clock(others)
    if clock is not None and usual is not None and clock > MOST_OF_CLOCK * usual:
        return None
    reasons: dict[str, float] = {}
    for gpu_of_rank in theirs:
        for reason, share in gpu_of_rank.statistics.throttling().items():
            reasons[reason] = max(share, reasons.get(reason, 0.0))
    return Throttling(reasons, tuple(sorted({gpu_of_rank.name for gpu_of_rank in theirs})), clock, usual)


def _rank_gpus(nodes: Sequence[NodeSamples], rank: int) -> list[_RankGpu]:
    gpus = []
    for node in nodes:
        indices = node.statistics.ranks.get(str(rank), {}).get("gpus", ())
        for index in indices:
            statistics = node.stepping[index] if index < len(node.stepping) else GpuStatistics()
            if statistics.count >= FEWEST_SAMPLES:
                gpus.append(_RankGpu(f"{node.host}:{node.gpu_index(index)}", statistics))
    return gpus


def _clock(gpus_of_rank: Sequence[_RankGpu]) -> float | None:
    clocks = [gpu_of_rank.clock for gpu_of_rank in gpus_of_rank if gpu_of_rank.clock is not None]
    return mean(clocks) if clocks else None

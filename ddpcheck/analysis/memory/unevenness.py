"""Does a rank hold much more memory than the others, all along?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from ddpcheck.analysis.memory.collector import RankMemory

LEAST_STEPS = 20
LEAST_SHARE = 0.25
# A device that is full ends the job; the host's memory is shared, and one rank often has more to do there.
LEAST_ON_DEVICE, LEAST_ON_HOST = 256 << 20, 512 << 20

PARTS = ("parameters", "gradients", "buckets", "state", "buffers")


@dataclass(frozen=True)
class Uneven:
    """A rank that holds more than the others do."""

    rank: int
    level: int
    usual: int
    # The part that differs most, where one accounts for most of it.
    part: str


def uneven_ranks(ranks: Mapping[int, RankMemory], sharded: bool) -> list[Uneven]:
    """`sharded`: optimizer state is dealt out to the ranks, and rightly differs."""
    settled = {rank: memory for rank, memory in ranks.items() if memory.steps >= LEAST_STEPS}
    if len(settled) < 2 or len(settled) < len(ranks) or len({m.on_device for m in settled.values()}) > 1:
        return []
    levels = {rank: _level(memory, sharded) for rank, memory in settled.items()}
    usual = median_low(levels.values())
    least = LEAST_ON_DEVICE if next(iter(settled.values())).on_device else LEAST_ON_HOST
    bound = usual + max(least, LEAST_SHARE * usual)
    return [
        Uneven(rank, level, usual, _part(settled, rank, level - usual))
        for rank, level in sorted(levels.items())
        if level >= bound
    ]


def _level(memory: RankMemory, sharded: bool) -> int:
    return memory.level - (memory.part("state") if sharded else 0)


def _part(ranks: Mapping[int, RankMemory], odd: int, excess: int) -> str:
    for name in PARTS:
        usual = median_low(memory.part(name) for memory in ranks.values())
        if ranks[odd].part(name) - usual > excess / 2:
            return "optimizer state" if name == "state" else name
    return ""

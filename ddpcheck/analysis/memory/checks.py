"""Ranks with more memory than others, and memory that options of DDP and the optimizer would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.memory.collector import RankMemory

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

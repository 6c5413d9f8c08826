"""What an option would spare each rank, in bytes, reckoned from what its tensors hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.memory.collector import RankMemory

LEAST_STEPS = 20
UNEVENNESS_LEAST_SHARE = 0.25
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
    bound = usual + max(least, UNEVENNESS_LEAST_SHARE * usual)
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


_ZERO = "ZeroRedundancyOptimizer"


def sharded(attempt: Attempt) -> bool:
    """By its class: state that happens to differ would look the same in the records."""
    return any(record.name == _ZERO for rank in attempt.ranks.values() for record in rank.optimizers.values())


# Less than this, or than this share of what the rank holds, is not worth a word.
LEAST = 64 << 20
LEAST_SHARE = 0.05
# Gradients count as kept if most of them were still there when the next backward began.
MOST_KEPT = 0.5


@dataclass(frozen=True)
class Saving:
    """One option."""

    option: str
    bytes: int
    how: str


def savings_of(memory: RankMemory, group_size: int, sharded: bool, hooked: bool) -> list[Saving]:
    """The largest first; none that is not worth a word. `hooked`: somebody else handles the gradients."""
    gradients, buckets, state = memory.part("gradients"), memory.part("buckets"), memory.part("state")
    found = []
    if not memory.views and group_size > 1 and not hooked:
        size = min(gradients, buckets)
        how = "gradients lie in DDP's buckets instead of beside them"
        found.append(Saving("gradient_as_bucket_view=True", size, how))
    kept = memory.part("kept")
    if kept >= MOST_KEPT * gradients:
        how = (
            "zero_grad(set_to_none=True), before the forward, frees the gradients while activations are there"
        )
        found.append(Saving("set_to_none=True", kept, how))
    if not sharded and group_size > 1:
        size = state - state // group_size
        found.append(
            Saving("ZeroRedundancyOptimizer", size, f"each of {group_size} ranks keeps a share of the state")
        )
    least = max(LEAST, LEAST_SHARE * memory.most)
    return sorted((saving for saving in found if saving.bytes >= least), key=lambda saving: -saving.bytes)

"""What an option would spare each rank, in bytes, reckoned from what its tensors hold."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.analysis.memory.collector import RankMemory

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

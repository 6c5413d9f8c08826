"""What a reduced gradient is, where it is not the mean: a sum, a mean divided again, a mean without some rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpcheck.analysis.allreduce.mean_check import check_parts
from ddpcheck.analysis.allreduce.sketch_table import Parts, SketchTable
from ddpcheck.records.sketch_codec import Packed


class Compared(NamedTuple):
    """One parameter of one backward: what every rank put in, and what came out."""

    parts: Parts
    result: Packed
    dtype: str
    numel: int
    place: int


def what_instead(compared: Sequence[Compared], local: SketchTable, group: Sequence[int]) -> str:
    """In words; empty where no single mistake explains every parameter of the backward."""
    telling = [each for each in compared if each.result.known and each.parts.norms]
    ranks = len(group)
    if not telling:
        return ""
    for divisor, words in (
        (1, f"the sum of the ranks' gradients, not divided by {ranks}"),
        (ranks * ranks, f"the mean of the ranks' gradients divided by {ranks} once more: divided twice"),
    ):
        if _explains(telling, divisor):
            return words
    for rank in local.ranks:
        for divisor in (ranks, ranks - 1):
            if _explains(telling, divisor, rank, local):
                return f"what the ranks computed without rank {rank}, divided by {divisor}"
    return ""


def _explains(
    telling: Sequence[Compared], divisor: int, left_out: int | None = None, local: SketchTable | None = None
) -> bool:
    """Whether every parameter is the sum of the ranks' gradients, but for one rank's, over `divisor`."""
    for each in telling:
        parts = each.parts
        if local is not None and left_out is not None:
            own = local.at(left_out, each.place)
            parts = parts if own is None else parts.without(own)
        if not check_parts(parts, each.result, each.dtype, each.numel, divisor).ok:
            return False
    return True

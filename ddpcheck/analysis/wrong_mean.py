"""What a reduced gradient is, where it is not the mean: a sum, a mean divided again, a mean without some rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpcheck.analysis.mean_check import mean_check
from ddpcheck.probes.sketches.packing import Packed


class Compared(NamedTuple):
    """One parameter of one backward: what every rank put in, and what came out."""

    parts: Mapping[int, Packed]
    result: Packed
    dtype: str
    numel: int


def what_instead(compared: Sequence[Compared], ranks: int) -> str:
    """In words; empty where no single mistake explains every parameter of the backward."""
    telling = [each for each in compared if each.result.known and any(p.norm for p in each.parts.values())]
    if not telling:
        return ""
    for divisor, words in (
        (1, f"the sum of the ranks' gradients, not divided by {ranks}"),
        (ranks * ranks, f"the mean of the ranks' gradients divided by {ranks} once more: divided twice"),
    ):
        if _explains(telling, divisor):
            return words
    for left_out in range(ranks):
        for divisor in (ranks, ranks - 1):
            if _explains(telling, divisor, left_out):
                return f"what the ranks computed without rank {left_out}, divided by {divisor}"
    return ""


def _explains(telling: Sequence[Compared], divisor: int, left_out: int | None = None) -> bool:
    """Whether every parameter is the sum of the ranks' gradients, but for one rank's, over `divisor`."""
    return all(
        mean_check(_without(each.parts, left_out), each.result, each.dtype, each.numel, divisor).ok
        for each in telling
    )


def _without(parts: Mapping[int, Packed], left_out: int | None) -> Mapping[int, Packed]:
    return {rank: part for rank, part in parts.items() if rank != left_out}

"""How many parameters differed across ranks, step by step; of a long job one figure stands for several steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpcheck.records.digest_codec import unpack_leaves
from ddpcheck.records.schema import DigestRecord

MOST_POINTS = 1024
# Leaves looked at for one step: where every one of a thousand ranks holds something else, some of them tell enough.
MOST_LEAVES = 200_000


@dataclass
class DifferingBook:
    """One module's. Of steps that share a point, the first at which anything differed counts."""

    every: int = 1
    # By number of the stretch of `every` steps.
    points: dict[int, int] = field(default_factory=dict)

    def note(self, step: int, said: Sequence[DigestRecord]) -> None:
        number = step // self.every
        # Wrapping comes before the first step. What is counted already is not counted again: it takes a while.
        if step < 0 or self.points.get(number):
            return
        self.points[number] = differing(said)
        while len(self.points) > MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        halved: dict[int, int] = {}
        for number, count in sorted(self.points.items()):
            halved[number // 2] = halved.get(number // 2) or count
        self.points = halved
        self.every *= 2


def differing(said: Sequence[DigestRecord]) -> int:
    """Parameters that are not the same on all ranks; at least one where the whole is not."""
    distinct = list({record.root: record for record in said}.values())
    if len(distinct) < 2:
        return 0
    first, *others = [unpack_leaves(record.leaves, record.width) for record in distinct]
    places: set[int] = set()
    for leaves in others[: max(1, MOST_LEAVES // (len(first) + 1))]:
        places |= {place for place, pair in enumerate(zip(first, leaves, strict=False)) if pair[0] != pair[1]}
        places |= set(range(min(len(first), len(leaves)), max(len(first), len(leaves))))
    return max(1, len(places))

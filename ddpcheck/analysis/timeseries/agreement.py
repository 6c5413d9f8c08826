"""Who agreed at which steps, as stretches of steps that went alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpcheck.analysis.timeseries.model import AgreementInterval
from ddpcheck.records.digest_codec import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord

MOST_POINTS = 1024
# Leaves looked at for one step: where every one of a thousand ranks holds something else, some of them tell enough.
MOST_LEAVES = 200_000


@dataclass
class DifferingSeries:
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


# A job whose ranks agree now and then makes a stretch each time; more than this nobody looks at.
MOST_STRETCHES = 2000
# Ranks named in all stretches together.
MOST_NAMED = 100_000


@dataclass
class AgreementSeries:
    """One module's; fed moment by moment, in whatever order they are complete."""

    stretches: list[AgreementInterval] = field(default_factory=list)
    cut: bool = False
    # How many parameters differed, step by step.
    differing: DifferingSeries = field(default_factory=DifferingSeries)
    _named: int = 0

    def note(self, step: int, group: tuple[int, ...], said: Mapping[int, str]) -> None:
        """`said` holds what each rank's parameters came to; ranks of the group that are not in it were silent."""
        odd, majority = _odd(said)
        absent = tuple(rank for rank in group if rank not in said)
        last = self.stretches[-1] if self.stretches else None
        # Wrapping is no step and stays apart from the first ones.
        if last and last.first >= 0 and last.last <= step and (last.odd, last.absent) == (odd, absent):
            self.stretches[-1] = replace(last, last=step, compared=last.compared + (step > last.last))
            return
        self._named += len(odd) + len(absent)
        if len(self.stretches) >= MOST_STRETCHES or self._named > MOST_NAMED:
            self.cut = True
            return
        self.stretches.append(AgreementInterval(step, step, 1, odd, absent, majority))


def _odd(said: Mapping[int, str]) -> tuple[tuple[int, ...], bool]:
    """Ranks outside the largest group, and whether it is a majority."""
    if len(set(said.values())) == 1:
        return (), True
    counts: dict[str, int] = {}
    for root in said.values():
        counts[root] = counts.get(root, 0) + 1
    largest = max(counts, key=lambda root: counts[root])
    if 2 * counts[largest] <= len(said):
        return tuple(sorted(said)), False
    return tuple(sorted(rank for rank, root in said.items() if root != largest)), True

"""Who agreed at which steps, as stretches of steps that went alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ddpcheck.analysis.history.differing_book import DifferingBook
from ddpcheck.analysis.history.result import AgreementStretch

# A job whose ranks agree now and then makes a stretch each time; more than this nobody looks at.
MOST_STRETCHES = 2000
# Ranks named in all stretches together.
MOST_NAMED = 100_000


@dataclass
class AgreementBook:
    """One module's; fed moment by moment, in whatever order they are complete."""

    stretches: list[AgreementStretch] = field(default_factory=list)
    cut: bool = False
    # How many parameters differed, step by step.
    differing: DifferingBook = field(default_factory=DifferingBook)
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
        self.stretches.append(AgreementStretch(step, step, 1, odd, absent, majority))


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

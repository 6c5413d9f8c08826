"""What could make links slow: each possible cause, and the links it would touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Cell = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Hypothesis:
    """A cause with the cells it slows down. `family`: how many of its kind are tried, this one included."""

    kind: str
    units: tuple[int, ...]
    cells: frozenset[Cell]
    family: int


def between_nodes(rates: Mapping[Cell, float]) -> list[Hypothesis]:
    """For a matrix in which everybody is measured with everybody."""
    units = _units(rates)
    return _distinct([*_of_units(units, rates), *_of_pairs(rates), *_islands(units, rates)], rates)


def within_nodes(rates: Mapping[Cell, float], groups: Sequence[Sequence[int]]) -> list[Hypothesis]:
    """For links inside several nodes, which are of one class."""
    inside = [
        Hypothesis("slow inside", (number,), frozenset(c for c in rates if set(c) <= set(group)), len(groups))
        for number, group in enumerate(groups)
    ]
    return _distinct([*inside, *_of_units(_units(rates), rates), *_of_pairs(rates)], rates)


def _of_units(units: Sequence[int], cells: Iterable[Cell]) -> Iterator[Hypothesis]:
    cells = list(cells)
    for unit in units:
        sent = frozenset(cell for cell in cells if cell[0] == unit)
        received = frozenset(cell for cell in cells if cell[1] == unit)
        yield Hypothesis("slow node", (unit,), sent | received, len(units))
        yield Hypothesis("slow sending", (unit,), sent, 2 * len(units))
        yield Hypothesis("slow receiving", (unit,), received, 2 * len(units))


def _of_pairs(cells: Iterable[Cell]) -> Iterator[Hypothesis]:
    cells = set(cells)
    for a, b in sorted(cells):
        yield Hypothesis("slow direction", (a, b), frozenset({(a, b)}), len(cells))
        if a < b and (b, a) in cells:
            yield Hypothesis("slow link", (a, b), frozenset({(a, b), (b, a)}), max(1, len(cells) // 2))


def _islands(units: Sequence[int], rates: Mapping[Cell, float]) -> Iterator[Hypothesis]:
    """Partings of all into two groups of two or more: those that cutting the fastest tree in one place gives.

    Inside an island links are fast, so the tree of fastest links crosses between two islands only once.
    """
    for small in _cuts(units, rates):
        if 2 <= len(small) <= len(units) - 2:
            crossing = frozenset(cell for cell in rates if (cell[0] in small) != (cell[1] in small))
            # Cuts are chosen by looking at the rates: that is worth as much as having tried all of them.
            yield Hypothesis("islands", tuple(sorted(small)), crossing, 2 ** (len(units) - 1))


def _cuts(units: Sequence[int], rates: Mapping[Cell, float]) -> Iterator[set[int]]:
    tree = _fastest_tree(units, rates)
    for left_out in tree:
        neighbours: dict[int, set[int]] = {unit: set() for unit in units}
        for a, b in tree:
            if (a, b) != left_out:
                neighbours[a].add(b)
                neighbours[b].add(a)
        side, frontier = {left_out[0]}, [left_out[0]]
        while frontier:
            fresh = neighbours[frontier.pop()] - side
            side |= fresh
            frontier.extend(fresh)
        yield side if 2 * len(side) <= len(units) else set(units) - side


def _fastest_tree(units: Sequence[int], rates: Mapping[Cell, float]) -> list[Cell]:
    """A spanning tree of the fastest links; a link is as fast as its slower direction."""

    def rate(a: int, b: int) -> float:
        return min(rates.get((a, b), 0.0), rates.get((b, a), 0.0))

    reached, tree = [units[0]], list[Cell]()
    waiting = list(units[1:])
    while waiting:
        a, b = max(((a, b) for a in reached for b in waiting), key=lambda pair: rate(*pair))
        tree.append((a, b))
        reached.append(b)
        waiting.remove(b)
    return tree


def _units(cells: Iterable[Cell]) -> list[int]:
    return sorted({unit for cell in cells for unit in cell})


def _distinct(found: Sequence[Hypothesis], cells: Iterable[Cell]) -> list[Hypothesis]:
    """Of causes that touch the same links the last, which is the most modest; none that touches all or none."""
    every = frozenset(cells)
    by_cells = {one.cells: one for one in found if one.cells and one.cells != every}
    return list(by_cells.values())

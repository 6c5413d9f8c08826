"""Very many ranks in three lines: the least, the median and the most of all at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median

from ddpcheck.analysis.timeseries.model import Figure, Line

LEAST, MEDIAN, MOST = "least", "median", "most"
Key = tuple[Figure, str]
Pick = Callable[[list[float]], float]


def spread_of(ranks: Iterable[tuple[Line, ...]]) -> Mapping[str, tuple[Line, ...]]:
    """Of each figure that ranks have."""
    gathered: dict[Key, dict[int, list[float]]] = {}
    for lines in ranks:
        for each in lines:
            by_step = gathered.setdefault((each.figure, each.of), {})
            for step, value in zip(each.steps, each.values, strict=True):
                by_step.setdefault(step, []).append(value)
    picks: dict[str, Pick] = {LEAST: min, MEDIAN: median, MOST: max}
    return {name: tuple(_line(key, gathered[key], pick) for key in gathered) for name, pick in picks.items()}


def _line(key: Key, by_step: Mapping[int, list[float]], pick: Pick) -> Line:
    steps = sorted(by_step)
    return Line(key[0], steps, [pick(by_step[step]) for step in steps], key[1])

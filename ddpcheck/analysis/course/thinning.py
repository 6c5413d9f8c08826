"""Lines of as many points as there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.analysis.timeseries.model import Figure, Line

# TensorBoard itself shows no more of a line.
MOST_POINTS = 1000
LEAST_POINTS = 100
# Points of a line, times the ranks that are shown.
_ROOM = 32_000


def room_for(ranks: int) -> int:
    """Points of each line, where so many ranks have one each."""
    return max(LEAST_POINTS, min(MOST_POINTS, _ROOM // max(1, ranks)))


def line(
    figure: Figure, steps: Sequence[int], values: Sequence[float | None], room: int, of: str = ""
) -> Line | None:
    """What is known of it, thinned; None where nothing is."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    points = _thinned(points, room)
    if not points:
        return None
    return Line(figure, [step for step, _ in points], [float(value) for _, value in points], of)


def _thinned(points: list[tuple[int, float]], room: int) -> list[tuple[int, float]]:
    """By the step and not by the place, so that lines of different ranks keep the same steps; and the last."""
    grid = 1
    kept = points
    while len(kept) > room:
        grid *= 2
        kept = [point for point in kept if point[0] % grid == 0]
    if points and not kept:
        kept = points[:: -(-len(points) // room)]
    return kept if kept[-1:] == points[-1:] else [*kept, points[-1]]


def there(lines: Iterable[Line | None]) -> tuple[Line, ...]:
    return tuple(each for each in lines if each is not None)

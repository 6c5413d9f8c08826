"""Step ranges as users write them, "3,10:13,50:": parsed by the command line and inside ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRanges:
    """A set of steps; an end of None means no end."""

    ranges: tuple[tuple[int, int | None], ...] = ()

    def __contains__(self, step: int) -> bool:
        return any(first <= step and (end is None or step < end) for first, end in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)


def parse_steps(text: str) -> StepRanges:
    """ "3,10:13" is steps 3, 10, 11 and 12; raises ValueError with a message for the user."""
    ranges: list[tuple[int, int | None]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, colon, end = part.partition(":")
        try:
            start = int(first or 0)
            stop = start + 1 if not colon else (int(end) if end else None)
        except ValueError:
            raise ValueError(f"{part!r} is neither a step nor a range of steps such as 10:13") from None
        if start < 0 or (stop is not None and stop <= start):
            raise ValueError(
                f"{part!r} is empty: steps count from 0, and the end of a range is not part of it"
            )
        ranges.append((start, stop))
    return StepRanges(tuple(ranges))

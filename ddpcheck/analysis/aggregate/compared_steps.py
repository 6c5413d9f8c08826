"""A set of steps that stays small for steps at regular intervals."""

from __future__ import annotations

from collections.abc import Iterator

# Regular steps need one range for each stride. A job that is checked at irregular steps forgets the oldest.
_MOST_RANGES = 1024


class ComparedSteps:
    """A set of steps, stored as ranges with a stride: small for steps at regular intervals."""

    def __init__(self) -> None:
        # First step, last step, stride.
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, step: int) -> None:
        if self._ranges:
            first, last, stride = self._ranges[-1]
            if step == last + stride:
                self._ranges[-1] = (first, step, stride)
                return
            if first == last and step > last:
                self._ranges[-1] = (first, step, step - first)
                return
            if step in self:
                return
        self._ranges.append((step, step, 1))
        if len(self._ranges) > _MOST_RANGES:
            del self._ranges[0]

    def add_range(self, first: int, last: int, count: int) -> None:
        """Add `count` steps at regular intervals, later than all others."""
        stride = max(1, (last - first) // max(1, count - 1)) if count > 1 else 1
        if self._ranges and self._ranges[-1][2] == stride and self._ranges[-1][1] + stride == first:
            self._ranges[-1] = (self._ranges[-1][0], last, stride)
            return
        self._ranges.append((first, last, stride))
        if len(self._ranges) > _MOST_RANGES:
            del self._ranges[0]

    def __contains__(self, step: int) -> bool:
        return any(
            first <= step <= last and (step - first) % stride == 0 for first, last, stride in self._ranges
        )

    def __iter__(self) -> Iterator[int]:
        for first, last, stride in self._ranges:
            yield from range(first, last + 1, stride)

    def covers(self, first: int, last: int) -> bool:
        """Whether every step from `first` to `last` is in the set."""
        return last - first < _MOST_RANGES and all(step in self for step in range(first, last + 1))

    def last_before(self, step: int) -> int | None:
        """The last step of the set before `step`."""
        return max(
            (
                first + (min(last, step - 1) - first) // stride * stride
                for first, last, stride in self._ranges
                if first < step
            ),
            default=None,
        )

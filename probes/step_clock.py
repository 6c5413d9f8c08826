"""Adds up how long the training thread spends in each part of a step."""

from __future__ import annotations

from typing import NamedTuple

# What begins and ends. Buffers are synchronised inside a forward, a reduction is finished inside a backward.
DATA, FORWARD, BUFFERS, BACKWARD, FINISH, OPTIMIZER = range(6)
PARTS = 6


class Row(NamedTuple):
    """One optimizer step, in microseconds; `total` is without the time that ddpcheck itself took."""

    step: int
    total: int
    data: int
    forward: int
    backward: int
    # For communication: the parts of forward and backward in which DDP synchronises.
    wait: int
    optimizer: int
    watching: int
    # In line for a processor; -1: not known.
    queued: int
    # Page faults of the training thread, and the kernel's time; -1: not known.
    faults: int = -1
    kernel: int = -1


class StepClock:
    """Told of the begin and end of parts in nanoseconds; several of one part in a step are added up."""

    def __init__(self) -> None:
        self._since = [0] * PARTS
        self._spent = [0] * PARTS
        # Batches that were fetched and not yet trained on.
        self._fetched = 0
        self._began = 0
        self._watched = 0

    def begin(self, part: int, now: int) -> None:
        self._since[part] = now

    def end(self, part: int, now: int) -> None:
        """An end without a begin, as after an exception, says nothing."""
        since = self._since[part]
        if since:
            self._since[part] = 0
            self._spent[part] += now - since

    def under_way(self, part: int) -> bool:
        return self._since[part] != 0

    def got_batch(self, now: int) -> None:
        since = self._since[DATA]
        if since:
            self._since[DATA] = 0
            self._fetched += now - since

    def ran_out(self) -> None:
        """A loader came to its end: what was fetched since the last forward was no training data."""
        self._since[DATA] = 0
        self._fetched = 0

    def feed(self) -> None:
        """A training forward: what was fetched before it counts."""
        self._spent[DATA] += self._fetched
        self._fetched = 0

    def close(
        self, step: int, now: int, watched: int, queued: int, faults: int = -1, kernel: int = -1
    ) -> Row | None:
        """A step is done and the next begins; None for the first, whose begin nobody saw."""
        began, self._began = self._began, now
        before, self._watched = self._watched, watched
        spent, self._spent = self._spent, [0] * PARTS
        self._since = [0] * PARTS
        if not began:
            return None
        forward = max(0, spent[FORWARD] - spent[BUFFERS])
        backward = max(0, spent[BACKWARD] - spent[FINISH])
        return Row(
            step=step,
            total=_micro(now - began),
            data=_micro(spent[DATA]),
            forward=_micro(forward),
            backward=_micro(backward),
            wait=_micro(spent[BUFFERS] + spent[FINISH]),
            optimizer=_micro(spent[OPTIMIZER]),
            watching=_micro(watched - before),
            queued=queued,
            faults=faults,
            kernel=kernel,
        )


def _micro(nanoseconds: int) -> int:
    return (nanoseconds + 500) // 1000

"""The log of the simulated accelerator, and a happens-before check of it.

A vector clock per stream and for the host: an access is ordered after another one if its clock has seen it. Two
accesses to the same memory, at least one of them a write, that are not ordered either way are a race.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.accelerator.device import native
from tests.accelerator.ownership import OWN

HOST = (-1, -1)
# What makes the host wait for the device.
WAITS = frozenset(
    {"synchronize_event", "synchronize_stream", "synchronize_device", "blocking_copy", "item", "implicit"}
)

STEP = "step"

Stream = tuple[int, int]


class Line(NamedTuple):
    """One call. `event` and `version` identify what was recorded."""

    kind: str
    name: str
    device: int
    stream: int
    owner: int
    event: int
    version: int
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]

    @property
    def by_ddpcheck(self) -> bool:
        return self.owner == OWN


class Race(NamedTuple):
    """Two kernels that are not ordered, and use the same memory."""

    first: Line
    second: Line

    @property
    def of_ddpcheck(self) -> bool:
        return self.first.by_ddpcheck or self.second.by_ddpcheck

    def __str__(self) -> str:
        names = [f"{line.name} on stream {line.device}:{line.stream}" for line in self]
        return " and ".join(names)


def take() -> list[Line]:
    """What was logged since the last call."""
    return [Line(*line) for line in native.take_log()]


def step_line(number: int) -> Line:
    """Marks the end of a step in the log."""
    return Line(STEP, str(number), -1, -1, 0, 0, 0, [], [])


def write(path: Path, lines: Iterable[Line]) -> None:
    """For another process; `read` reads it."""
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def read(path: Path) -> list[Line]:
    return [Line(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def steps(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines of each step; what precedes the first is in the first."""
    parts: list[list[Line]] = [[]]
    for line in lines:
        if line.kind == STEP:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts[:-1]


def waits(lines: Iterable[Line]) -> list[Line]:
    """Where ddpcheck made the host wait for the device."""
    return [
        line for line in lines if line.by_ddpcheck and (line.kind in WAITS or line.name == "copy_waiting")
    ]


def kernels(lines: Iterable[Line]) -> list[Line]:
    """What ddpcheck launched."""
    return [line for line in lines if line.by_ddpcheck and line.kind == "kernel"]


class _Access(NamedTuple):
    begin: int
    end: int
    stream: Stream
    time: int
    written: bool
    line: Line


class _Memory:
    """The accesses to each allocation of the system. Reuse by the caching allocator does not clear them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._accesses: dict[int, list[_Access]] = {}

    def add(self, start: int, size: int) -> None:
        if start not in self._sizes:
            insort(self._starts, start)
            self._accesses[start] = []
        self._sizes[start] = size

    def accesses(self, address: int) -> list[_Access]:
        """Of the allocation that holds `address`; memory of the host has one list per address."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._starts[index] + self._sizes[self._starts[index]]:
            return self._accesses[self._starts[index]]
        return self._accesses.setdefault(address, [])

    def forget(self, start: int, size: int, clock: dict[Stream, int]) -> None:
        """The allocator reuses memory after an event: accesses before the event take part in no race."""
        for known in self._accesses.values():
            if known and start <= known[0].begin < start + size:
                known[:] = [each for each in known if clock.get(each.stream, 0) < each.time]


def races(lines: Iterable[Line]) -> list[Race]:
    clocks: dict[Stream, dict[Stream, int]] = {HOST: {}}
    events: dict[tuple[int, int], dict[Stream, int]] = {}
    memory, found = _Memory(), []

    def clock(stream: Stream) -> dict[Stream, int]:
        return clocks.setdefault(stream, {})

    for line in lines:
        stream = (line.device, line.stream)
        if line.kind == "allocate":
            memory.add(*line.writes[0])
        elif line.kind == "kernel":
            own = clock(stream)
            _join(own, clocks[HOST])
            own[stream] = own.get(stream, 0) + 1
            found += _check(memory, own, stream, line)
        elif line.kind == "record":
            _join(clock(stream), clocks[HOST])
            events[line.event, line.version] = dict(clock(stream))
        elif line.kind == "wait":
            _join(clock(stream), events.get((line.event, line.version), {}))
        elif line.kind == "reusable":
            memory.forget(*line.writes[0], events.get((line.event, line.version), {}))
        elif line.kind in ("query", "synchronize_event"):
            _join(clocks[HOST], events.get((line.event, line.version), {}))
        elif line.kind == "synchronize_device":
            for other in [other for other in clocks if other[0] == line.device]:
                _join(clocks[HOST], clocks[other])
        elif line.kind in ("synchronize_stream", "blocking_copy", "item", "implicit"):
            _join(clocks[HOST], clock(stream))
    return found


def _join(clock: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def _check(memory: _Memory, clock: dict[Stream, int], stream: Stream, line: Line) -> list[Race]:
    found = []
    accesses = [(start, size, False) for start, size in line.reads]
    accesses += [(start, size, True) for start, size in line.writes]
    for start, size, written in accesses:
        known = memory.accesses(start)
        now = _Access(start, start + size, stream, clock[stream], written, line)
        for before in known:
            overlaps = before.begin < now.end and now.begin < before.end
            ordered = clock.get(before.stream, 0) >= before.time
            if overlaps and (before.written or written) and not ordered:
                found.append(Race(before.line, line))
        # What this access is ordered after and covers can no longer take part in a race that it does not.
        known[:] = [before for before in known if not _covers(now, before, clock)]
        known.append(now)
    return found


def _covers(now: _Access, before: _Access, clock: dict[Stream, int]) -> bool:
    inside = now.begin <= before.begin and before.end <= now.end
    return inside and (now.written or not before.written) and clock.get(before.stream, 0) >= before.time

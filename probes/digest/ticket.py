"""Tickets: what `submit` hands out at once, and digests are collected from later."""

from __future__ import annotations

from typing import Protocol


class Ticket(Protocol):
    """Digests under way."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting; never waits itself."""

    def result(self) -> list[bytes]:
        """One leaf per tensor, in the order they were submitted; waits for the device where it has to."""


class ReadyTicket:
    """Digests that were finished before the ticket was written."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: list[bytes]) -> None:
        self._leaves = leaves

    def ready(self) -> bool:
        return True

    def result(self) -> list[bytes]:
        return self._leaves

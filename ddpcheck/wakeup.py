"""Wakes a thread of ddpcheck, from any code of the process."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wakeup:
    """An event that may also be set by code that interrupts a method of the same event.

    Python runs finalizers in whichever thread allocates next. One that reports the end of a wrapper may interrupt the
    thread that waits here; `threading.Event` would then block on the lock which that thread holds, and so would the
    training thread after it.
    """

    __slots__ = ("_is_set", "_tokens")

    def __init__(self) -> None:
        self._is_set = False
        # One for each change to set: its `put` is the only one of the standard library that may interrupt itself.
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._tokens.put(None)

    def clear(self) -> None:
        self._is_set = False
        with suppress(Empty):
            while True:
                self._tokens.get_nowait()

    def wait(self, seconds: float | None = None) -> None:
        """Until it is set. May return early, at a token that `set` has put after `clear`."""
        if self._is_set:
            return
        with suppress(Empty):
            self._tokens.get(timeout=seconds)

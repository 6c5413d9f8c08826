"""Finds out when in a step parameters are written by something else than the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import WatchedModule
    from ddpcheck.probes.write_detection import Marks

BEFORE_FORWARD = "before the forward"
IN_FORWARD = "inside the forward"
AFTER_BACKWARD = "between backward and step"


class Seen(NamedTuple):
    """How parameters stood when a forward began, and which one it was."""

    number: int
    marks: Marks


class WriteWatch:
    """Samples at the forward and at the backward, but only of modules that were written to before.

    Who writes once mostly does so at every step, so the second time tells; all others pay nothing for it.
    """

    def __init__(self) -> None:
        self._modules: set[int] = set()
        self._forwards: dict[int, Seen] = {}
        self._backwards: dict[int, Marks] = {}

    def awaits(self, watched: WatchedModule) -> bool:
        return watched.index in self._modules

    def forward(self, watched: WatchedModule, marks: Marks) -> None:
        self._forwards.setdefault(watched.index, Seen(watched.forwards, marks))

    def backward(self, watched: WatchedModule, marks: Marks) -> None:
        self._backwards.setdefault(watched.index, marks)

    def when(self, watched: WatchedModule, before: Marks | None) -> str:
        """When a write came that a step has found; "" where that cannot be told."""
        self._modules.add(watched.index)
        seen = self._forwards.pop(watched.index, None)
        at_backward = self._backwards.pop(watched.index, None)
        if seen is None or before is None:
            return ""
        if seen.marks != before:
            return BEFORE_FORWARD
        # Several forwards: the write may have come in any of them.
        if at_backward is None or watched.forwards > seen.number + 1:
            return ""
        return IN_FORWARD if at_backward != seen.marks else AFTER_BACKWARD

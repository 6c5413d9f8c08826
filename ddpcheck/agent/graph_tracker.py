"""Counts what a job captures into graphs of its device and replays: no hook runs in a replay, so nothing is checked.

Graphs are patched at the first capture that contains a call of DDP, an optimizer or `backward`: other jobs pay nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ddpcheck.device_api import graph_classes
from ddpcheck.guard import GUARD
from ddpcheck.patches import Patches, calling
from ddpcheck.records.kinds.rank import GraphRecord
from ddpcheck.records.registry import Record

_FORWARD, _BACKWARD, _STEP = "before_forward", "backward_called", "before_step"
_COUNTED = (_FORWARD, _BACKWARD, _STEP)


class GraphTracker:
    """Touches no device: it is called while a graph is captured."""

    def __init__(self, write: Callable[[Record], None]) -> None:
        self._write_record = write
        self._patches = Patches()
        self._patched = False
        # Of the capture under way, of all captures, and of all replays.
        self._open: Counter[str] = Counter()
        self._captured: Counter[str] = Counter()
        self._replayed: Counter[str] = Counter()
        self._captures = 0
        self._replays = 0
        self._contents: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
        self._written = GraphRecord()

    @property
    def forwards_captured(self) -> bool:
        """Whether forwards run in replays, where no hook sees them."""
        return bool(self._captured[_FORWARD] or self._open[_FORWARD])

    def skipped(self, name: str) -> None:
        """An entry into ddpcheck did nothing, because a graph is being captured."""
        if name in _COUNTED:
            self._open[name] += 1
            if not self._patched:
                self._patched = True
                self._patch()

    def _patch(self) -> None:
        ended = GUARD.protect("graphs", "capture_end", self._capture_ended, while_capturing=True)
        replayed = GUARD.protect("graphs", "replay", self._replay, while_capturing=True)
        for kind in graph_classes():
            self._patches.replace(kind, "capture_end", lambda original: calling(original, None, ended))
            self._patches.replace(kind, "replay", lambda original: calling(original, None, replayed))

    def _capture_ended(self, graph: Any) -> None:
        contents, self._open = self._open, Counter()
        if contents:
            self._captures += 1
            self._captured += contents
            self._contents[graph] = contents
            self._write()

    def _replay(self, graph: Any) -> None:
        contents = self._contents.get(graph)
        if contents is None:
            return
        self._replays += 1
        self._replayed += contents
        # A rank that is killed has written at least half of its count.
        if self._replays & (self._replays - 1) == 0:
            self._write()

    def close(self) -> None:
        """Also counts a capture whose end was not seen, as on a device whose graphs have other names."""
        if self._open:
            self._captures += 1
            self._captured += self._open
            self._open = Counter()
        self._write()
        self._patches.remove()
        self._patched = False

    def _write(self) -> None:
        record = GraphRecord(
            captures=self._captures,
            forwards=self._captured[_FORWARD],
            backwards=self._captured[_BACKWARD],
            steps=self._captured[_STEP],
            replays=self._replays,
            replayed_backwards=self._replayed[_BACKWARD],
            replayed_steps=self._replayed[_STEP],
        )
        if record != self._written:
            self._written = record
            self._write_record(record)

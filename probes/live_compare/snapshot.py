"""A look: the digests of one module's tensors at one moment, and the memory of the last few."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ddpcheck.records.kinds.digests import Stage, TensorKind

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule

Value = TypeVar("Value")


@dataclass(frozen=True)
class SnapshotKey:
    """What is looked at and when; the same on all ranks for the same moment of the job."""

    tracked: TrackedModule
    stage: Stage
    of: TensorKind
    step: int
    optimizer: int | None = None

    def key(self, session: str) -> bytes:
        text = f"{session}|{self.tracked.key}|{self.stage}|{self.of}|{self.optimizer}|{self.step}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(eq=False)
class Snapshot:
    """A moment with its digests."""

    moment: SnapshotKey
    key: bytes
    root: bytes
    leaves: list[bytes]
    samples: bytes
    # Place on the board; -1: not published.
    number: int = -1
    # Whether the tensors still are as they were looked at.
    current: bool = True
    detailed: bool = False
    captured: bool = False


class RecentSnapshots(Generic[Value]):
    """A dict that forgets its oldest entries: memory does not grow with steps."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key: bytes) -> Value | None:
        return self._items.get(key)

    def put(self, key: bytes, value: Value) -> None:
        self._items[key] = value
        if len(self._items) > self._most:
            self._items.popitem(last=False)

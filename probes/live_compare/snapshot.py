"""A snapshot: the digests of one module's tensors at one stage of a step, and a bounded cache of recent ones."""

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
    """Which tensors a snapshot covers, and when it was taken; all ranks make the same keys."""

    tracked: TrackedModule
    stage: Stage
    of: TensorKind
    step: int
    optimizer: int | None = None

    def hash(self, session: str) -> bytes:
        """Eight bytes that identify the key on all ranks of a session."""
        text = f"{session}|{self.tracked.key}|{self.stage}|{self.of}|{self.optimizer}|{self.step}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass(eq=False)
class Snapshot:
    """The digests of the tensors that `key` describes."""

    key: SnapshotKey
    key_hash: bytes
    root: bytes
    leaves: list[bytes]
    samples: bytes
    # Sequence number in the exchange; -1: not published.
    number: int = -1
    # Whether the tensors still have the values of the snapshot.
    current: bool = True
    detailed: bool = False
    captured: bool = False


class RecentSnapshots(Generic[Value]):
    """A dict by key hash that drops its oldest entries: memory does not grow with steps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key_hash: bytes) -> Value | None:
        return self._items.get(key_hash)

    def put(self, key_hash: bytes, value: Value) -> None:
        self._items[key_hash] = value
        if len(self._items) > self._limit:
            self._items.popitem(last=False)

"""Buffers values until all ranks have reported. The cost per value does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class PendingValues(Generic[Key, Value]):
    """Values by key and rank, in the order in which the first rank reported each key."""

    def __init__(self) -> None:
        # The values by rank, and the ranks that are missing. One table: hashing a key is the main cost of `add`.
        self._entries: dict[Key, tuple[dict[int, Value], set[int]]] = {}
        # Ranks that report nothing more.
        self._ended: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def add(self, key: Key, group: Collection[int], rank: int, value: Value) -> bool:
        """Add the value of a rank. True if all ranks of the group have reported now, except those that ended."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ({}, set(group) - self._ended)
        values, missing = entry
        values[rank] = value
        missing.discard(rank)
        return not missing

    def active(self, ranks: Collection[int]) -> set[int]:
        """Those of `ranks` that have not ended."""
        return set(ranks) - self._ended

    def end_rank(self, rank: int) -> list[Key]:
        """The rank reports nothing more. Returns the keys that waited only for it."""
        self._ended.add(rank)
        complete = []
        for key, (_, missing) in self._entries.items():
            if rank in missing:
                missing.discard(rank)
                if not missing:
                    complete.append(key)
        return complete

    def take(self, key: Key) -> dict[int, Value]:
        """Remove and return the values of a key, by rank."""
        return self._entries.pop(key)[0]

    def oldest(self) -> Key:
        return next(iter(self._entries))

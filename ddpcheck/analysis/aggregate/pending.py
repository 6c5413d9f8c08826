"""Who has spoken of what, and whom it waits for: as quick for a record among thousands of ranks as among two."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Said = TypeVar("Said")


class PendingValues(Generic[Key, Said]):
    """Things that every rank of a group is to speak of, in the order in which the first did."""

    def __init__(self) -> None:
        self._said: dict[Key, dict[int, Said]] = {}
        self._missing: dict[Key, set[int]] = {}
        # Ranks from which nothing more comes.
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._said)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._said)

    def hear(self, key: Key, group: Collection[int], rank: int, said: Said) -> bool:
        """Whether all of the group have spoken now, but for those that are gone."""
        missing = self._missing.get(key)
        if missing is None:
            self._said[key] = {}
            missing = self._missing[key] = set(group) - self._gone
        self._said[key][rank] = said
        missing.discard(rank)
        return not missing

    def still_here(self, ranks: Collection[int]) -> set[int]:
        """Those of `ranks` that have not been told to be gone yet."""
        return set(ranks) - self._gone

    def leave(self, rank: int) -> list[Key]:
        """Nothing more comes from this rank; what had waited for it alone comes back."""
        self._gone.add(rank)
        complete = []
        for key, missing in self._missing.items():
            if rank in missing:
                missing.discard(rank)
                if not missing:
                    complete.append(key)
        return complete

    def take(self, key: Key) -> dict[int, Said]:
        """What was said; it is forgotten here."""
        del self._missing[key]
        return self._said.pop(key)

    def oldest(self) -> Key:
        return next(iter(self._said))

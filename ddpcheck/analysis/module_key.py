"""A module's name across ranks: the ranks of its group, and its number among those wrapped in it.

Of thousands of ranks it is a long tuple, and it is the key of nearly every table here, asked for with every record.
So there is one object for each module, and it computes its hash once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

ModuleKey = tuple[tuple[int, ...], int]


class _Key(tuple):  # type: ignore[type-arg]
    """A tuple in every way."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


@lru_cache(maxsize=1024)
def _made(group: tuple[int, ...], ordinal: int) -> ModuleKey:
    return _Key((group, ordinal))


def module_key(group: Iterable[int], ordinal: int) -> ModuleKey:
    return _made(tuple(group), ordinal)


@lru_cache(maxsize=1024)
def members(module: ModuleKey) -> frozenset[int]:
    return frozenset(module[0])

"""Identifies a module across ranks: the ranks of its process group, and its number among the modules of that group.

The key of nearly every table. With thousands of ranks it is a long tuple, so there is one object per module, which
computes its hash once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

ModuleKey = tuple[tuple[int, ...], int]


class _Key(tuple):  # type: ignore[type-arg]
    """A tuple that caches its hash."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


@lru_cache(maxsize=1024)
def _key(group: tuple[int, ...], ordinal: int) -> ModuleKey:
    return _Key((group, ordinal))


def module_key(group: Iterable[int], ordinal: int) -> ModuleKey:
    return _key(tuple(group), ordinal)


@lru_cache(maxsize=1024)
def members(module: ModuleKey) -> frozenset[int]:
    return frozenset(module[0])

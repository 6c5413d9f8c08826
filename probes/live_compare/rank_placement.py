"""Which rank runs on which node, collected through the job's store."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

# Rank 0 collects the placements of all ranks and stores them under one key. After this many attempts without it, a
# node collects them itself.
_MAX_ATTEMPTS = 20

# The node's id and the host name.
Placement = tuple[str, str]


class RankPlacement:
    """Used by the comparison thread."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._attempts = 0

    def publish(self, store: Any, node: str) -> None:
        """Store the placement of this rank."""
        store.set(self._key(self._rank), json.dumps([node, socket.gethostname()]))
        store.add(f"{self._prefix}/placed", 1)

    def read(self, store: Any, partial: bool) -> dict[int, Placement]:
        """By rank, when all ranks have published; with `partial` those that have. Empty: not yet."""
        # Reading a count is one small request; checking the key of every rank would be many.
        if store.add(f"{self._prefix}/placed", 0) < self._world_size:
            ranks = [rank for rank in range(self._world_size) if partial and store.check([self._key(rank)])]
            return self._collect(store, ranks)
        if self._rank:
            if store.check([self._all_key]):
                return _decode(store.get(self._all_key))
            self._attempts += 1
            if self._attempts < _MAX_ATTEMPTS and not partial:
                return {}
        placements = self._collect(store, range(self._world_size))
        if not self._rank:
            store.set(self._all_key, _encode(placements))
        return placements

    @property
    def _all_key(self) -> str:
        return f"{self._prefix}/placements"

    def _collect(self, store: Any, ranks: Iterable[int]) -> dict[int, Placement]:
        """In one request, if the store supports it."""
        ranks = list(ranks)
        keys = [self._key(rank) for rank in ranks]
        in_one_request = bool(keys) and getattr(store, "has_extended_api", bool)()
        values = store.multi_get(keys) if in_one_request else [store.get(key) for key in keys]
        return {rank: tuple(json.loads(text)) for rank, text in zip(ranks, values, strict=True)}

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"


def _encode(placements: dict[int, Placement]) -> str:
    """Each node once, and for each rank the index of its node."""
    nodes = list(dict.fromkeys(placements.values()))
    indices = {placement: index for index, placement in enumerate(nodes)}
    by_rank = [indices[placements[rank]] for rank in sorted(placements)]
    return json.dumps([nodes, by_rank], separators=(",", ":"))


def _decode(text: bytes) -> dict[int, Placement]:
    nodes, by_rank = json.loads(text)
    return {rank: tuple(nodes[index]) for rank, index in enumerate(by_rank)}

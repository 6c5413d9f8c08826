"""Which rank is on which node, told through the job's store: of thousands of ranks it is gathered once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

# Rank 0 gathers what all ranks said and lays it down as one piece. Asked so often in vain, a node gathers for itself.
_PATIENCE = 20

# The node and the host's name.
Where = tuple[str, str]


class Whereabouts:
    """Asked from the thread that speaks with other nodes."""

    def __init__(self, drawer: str, rank: int, world_size: int) -> None:
        self._drawer, self._rank, self._world_size = drawer, rank, world_size
        self._asked = 0

    def say(self, store: Any, node: str) -> None:
        """Where this rank is."""
        store.set(self._place(self._rank), json.dumps([node, socket.gethostname()]))
        store.add(f"{self._drawer}/here", 1)

    def ask(self, store: Any, at_last: bool) -> dict[int, Where]:
        """By rank, once all have said it; `at_last` those that have. Empty: not yet."""
        # A count is one small question: the places of all ranks would be as many keys.
        if store.add(f"{self._drawer}/here", 0) < self._world_size:
            some = [rank for rank in range(self._world_size) if at_last and store.check([self._place(rank)])]
            return self._gather(store, some)
        if self._rank:
            if store.check([self._gathered]):
                return _unfolded(store.get(self._gathered))
            self._asked += 1
            if self._asked < _PATIENCE and not at_last:
                return {}
        found = self._gather(store, range(self._world_size))
        if not self._rank:
            store.set(self._gathered, _folded(found))
        return found

    @property
    def _gathered(self) -> str:
        return f"{self._drawer}/everyone"

    def _gather(self, store: Any, ranks: Iterable[int]) -> dict[int, Where]:
        """At once, where the store can do that."""
        asked = list(ranks)
        keys = [self._place(rank) for rank in asked]
        at_once = bool(keys) and getattr(store, "has_extended_api", bool)()
        said = store.multi_get(keys) if at_once else [store.get(key) for key in keys]
        return {rank: tuple(json.loads(text)) for rank, text in zip(asked, said, strict=True)}

    def _place(self, rank: int) -> str:
        return f"{self._drawer}/rank/{rank}"


def _folded(found: dict[int, Where]) -> str:
    """Each node once, and for each rank the number of its node."""
    nodes = list(dict.fromkeys(found.values()))
    numbers = {where: number for number, where in enumerate(nodes)}
    return json.dumps([nodes, [numbers[found[rank]] for rank in sorted(found)]], separators=(",", ":"))


def _unfolded(text: bytes) -> dict[int, Where]:
    nodes, numbers = json.loads(text)
    return {rank: tuple(nodes[number]) for rank, number in enumerate(numbers)}

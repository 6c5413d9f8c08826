"""What the ranks of this node have sent to other addresses, and how long their connections were busy with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddpcheck.sampling import tcp
from ddpcheck.sampling.tcp import Connection

# Bytes acknowledged; microseconds that the network was busy with them; the same with what was not its doing;
# packets sent again; the shortest round trip in microseconds; connections that are open.
NAMES = ("bytes", "network_busy", "busy", "retransmits", "min_rtt", "connections")
# A job of thousands of ranks may connect each with all others, but sends its gradients to few of them.
MOST_ROUTES = 32
# The store and the like: nothing can be told of a link by so little.
LEAST_BYTES = 1 << 20
# Between two readings, and of what the busiest connection between the same addresses sent: less is the store's, or
# tells a neighbour that one is ready. Such messages are under way for as long as the queue before them, and would
# make a link look busy that hardly moves anything.
LEAST_GROWTH = 16 << 10
LEAST_OF_THE_MOST = 0.1
# The share of one core that asking for connections may take, where there are very many.
MOST_OF_A_CORE = 0.004


@dataclass
class _Route:
    """All connections between two addresses, with what those that are gone have sent."""

    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    seen: dict[int, list[int]] = field(default_factory=dict)
    min_rtt: int = 0

    def take(self, found: Mapping[int, Connection]) -> None:
        """One reading. Connections side by side share the link: their bytes add up, their times do not."""
        counts = {inode: _counts(one) for inode, one in found.items()}
        grown = [_growth(self.seen.get(inode), row) for inode, row in counts.items()]
        self.seen = counts
        least = max(LEAST_GROWTH, LEAST_OF_THE_MOST * max((row[0] for row in grown), default=0))
        carrying = [row for row in grown if row[0] >= least]
        if carrying:
            sent, network_busy, busy, again = zip(*carrying, strict=True)
            more = sum(sent), max(network_busy), max(busy), sum(again)
            self.sums = [a + b for a, b in zip(self.sums, more, strict=True)]
        trips = [one.min_rtt for one in found.values() if one.min_rtt]
        self.min_rtt = min([*trips, self.min_rtt or max(trips, default=0)])

    def totals(self) -> list[int]:
        return [*self.sums, self.min_rtt, len(self.seen)]


class Connections:
    """Totals by local and remote address. Connections within one address stay in memory and are left out."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], _Route] = {}
        # Sockets that are known to belong to a rank, or not to; and to which ranks' processes they were compared.
        self._mine: dict[int, bool] = {}
        self._pids: frozenset[int] = frozenset()
        # When to ask next; for ever off where the kernel does not answer.
        self._next = 0.0

    def read(self, pids: Iterable[int]) -> dict[str, list[int]]:
        """By "local remote", in the order of `NAMES`; empty where it is not yet time to ask again."""
        known = frozenset(pids)
        if time.monotonic() < self._next or not (known or self._routes):
            return {}
        began = time.thread_time()
        try:
            found = tcp.sockets()
        except OSError:
            self._next = float("inf")  # a kernel or a sandbox that does not answer will not do so later
            return {}
        self._learn(found, known)
        self._take(found)
        self._next = time.monotonic() + (time.thread_time() - began) / MOST_OF_A_CORE
        return self._busiest()

    def _learn(self, found: dict[int, bytes], pids: frozenset[int]) -> None:
        """A socket may be passed on, and a rank be met after its sockets were: once a rank's, always a rank's."""
        if pids == self._pids and found.keys() <= self._mine.keys():
            return
        self._pids = pids
        held = {inode for pid in pids for inode in _sockets(pid)}
        self._mine = {inode: inode in held or self._mine.get(inode, False) for inode in found}

    def _take(self, found: dict[int, bytes]) -> None:
        by_route: dict[tuple[str, str], dict[int, Connection]] = {pair: {} for pair in self._routes}
        for inode, body in found.items():
            one = tcp.parse(body) if self._mine.get(inode) else None
            if one is not None and one.local != one.remote:
                by_route.setdefault((one.local, one.remote), {})[inode] = one
        for pair, connections in by_route.items():
            self._routes.setdefault(pair, _Route()).take(connections)

    def _busiest(self) -> dict[str, list[int]]:
        rows = [(pair, route.totals()) for pair, route in self._routes.items()]
        worth = sorted((row for row in rows if row[1][0] >= LEAST_BYTES), key=lambda row: -row[1][0])
        return {" ".join(pair): totals for pair, totals in worth[:MOST_ROUTES]}


def _counts(one: Connection) -> list[int]:
    waited_for_others = min(one.busy, one.receiver_limited + one.buffer_limited)
    return [one.bytes, one.busy - waited_for_others, one.busy, one.retransmits]


def _growth(before: list[int] | None, now: list[int]) -> list[int]:
    """Since the last reading, or since the connection was made. A number of an inode may be used again."""
    if before is None or now[0] < before[0]:
        return now
    return [max(0, b - a) for a, b in zip(before, now, strict=True)]


def _sockets(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds."""
    folder = f"/proc/{pid}/fd"
    found: set[int] = set()
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found

"""What the ranks of this node have sent to other addresses, and how long their connections were busy with it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from ddpcheck.sampling import tcp_diag
from ddpcheck.sampling.tcp_diag import Connection

# Bytes acknowledged; microseconds that the network was busy with them; the same with what was not its doing;
# packets sent again; the shortest round trip in microseconds; connections.
NAMES = ("bytes", "network_busy", "busy", "retransmits", "min_rtt", "connections")


@dataclass
class _Route:
    """All connections between two addresses, with those that are gone."""

    past: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    now: dict[tuple[int, int], Connection] = field(default_factory=dict)
    min_rtt: int = 0


class Connections:
    """Totals by local and remote address. Connections within one address stay in memory and are left out."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], _Route] = {}
        # Sockets that are known to belong to a rank, or not to; and to which ranks' processes they were compared.
        self._mine: dict[int, bool] = {}
        self._pids: frozenset[int] = frozenset()
        self._unable = False

    def read(self, pids: Iterable[int]) -> list[list[str | int]]:
        """For each pair of addresses: local, remote, and then in the order of `NAMES`."""
        if self._unable:
            return []
        try:
            found = [one for one in tcp_diag.connections() if one.local != one.remote]
        except OSError:
            self._unable = True  # a kernel or a sandbox that does not answer will not do so later
            return []
        self._learn(found, pids)
        for route in self._routes.values():
            _forget_closed(route, found)
        for one in found:
            if self._mine.get(one.inode):
                self._take(one)
        return [[*pair, *_totals(route)] for pair, route in self._routes.items()]

    def _learn(self, found: list[Connection], pids: Iterable[int]) -> None:
        known = frozenset(pids)
        if known == self._pids and {one.inode for one in found} <= self._mine.keys():
            return
        self._pids = known
        mine = {inode for pid in known for inode in _sockets(pid)}
        self._mine = {one.inode: self._mine.get(one.inode, False) or one.inode in mine for one in found}

    def _take(self, one: Connection) -> None:
        route = self._routes.setdefault((one.local, one.remote), _Route())
        route.now[one.ports] = one
        if one.min_rtt and (not route.min_rtt or one.min_rtt < route.min_rtt):
            route.min_rtt = one.min_rtt


def _forget_closed(route: _Route, found: list[Connection]) -> None:
    """What a connection had done when it was last seen stays in the total."""
    alive = {(one.local, one.remote, one.ports): one.inode for one in found}
    for ports, one in list(route.now.items()):
        if alive.get((one.local, one.remote, ports)) != one.inode:
            route.past = [a + b for a, b in zip(route.past, _counts(one), strict=True)]
            del route.now[ports]


def _counts(one: Connection) -> list[int]:
    waited_for_others = min(one.busy, one.receiver_limited + one.buffer_limited)
    return [one.bytes, one.busy - waited_for_others, one.busy, one.retransmits]


def _totals(route: _Route) -> list[int]:
    counts = [_counts(one) for one in route.now.values()]
    sums = [sum(column) for column in zip(route.past, *counts, strict=True)]
    return [*sums, route.min_rtt, len(route.now)]


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

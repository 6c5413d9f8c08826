"""Asks the kernel for this network namespace's TCP connections and what it keeps of each (`sock_diag(7)`).

No process is started for it and no right is needed. The numbers are those that `ss -ti` shows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48s")
_MESSAGE = struct.Struct("=BBBB48sIIIII")
_INODE = struct.Struct("=I")  # the last of them
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2  # the attribute that holds struct tcp_info
# Established, and half closed: what a rank has sent counts until the connection is gone.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9))
# Of struct tcp_info, which only ever grows at its end: offset and size of what is taken.
_BYTES_ACKED = (120, 8)
_TOTAL_RETRANS = (100, 4)
_MIN_RTT = (148, 4)
_BUSY_TIME = (168, 8)
_RWND_LIMITED = (176, 8)
_SNDBUF_LIMITED = (184, 8)
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection; times in microseconds since it was made."""

    local: str
    remote: str
    ports: tuple[int, int]
    # Sent, and acknowledged by the other end.
    bytes: int
    # Time with something to send, or sent and not acknowledged; and how much of it was not the network's doing:
    # the receiver took nothing more, or this end's buffer was too small.
    busy: int
    receiver_limited: int
    buffer_limited: int
    min_rtt: int
    retransmits: int


def sockets() -> dict[int, bytes]:
    """By inode, what the kernel says of each connection, for `parse`. Raises OSError where it does not answer.

    Not parsed yet: of thousands of connections most are none of ours.
    """
    found: dict[int, bytes] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.closing(_ask(family)) as answers:
            found.update(answers)
    return found


def _ask(family: int) -> Generator[tuple[int, bytes], None, None]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as asking:
        asking.settimeout(_PATIENCE_SECONDS)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES, bytes(48))
        size = _HEADER.size + len(request)
        asking.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + request)
        while True:
            answer = asking.recv(1 << 16)
            for kind, body in messages(answer):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if len(body) >= _MESSAGE.size:
                    yield _INODE.unpack_from(body, _MESSAGE.size - _INODE.size)[0], body


def messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Netlink messages: kind and what they hold."""
    while len(answer) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(answer)
        if size < _HEADER.size:
            return
        yield kind, answer[_HEADER.size : size]
        answer = answer[(size + 3) & ~3 :]


def parse(body: bytes) -> Connection | None:
    """None where the kernel tells nothing of the connection's past."""
    if len(body) < _MESSAGE.size:
        return None
    family, _, _, _, ends, *_ = _MESSAGE.unpack_from(body)
    info = _attribute(body[_MESSAGE.size :], _INFO)
    if len(info) < sum(_SNDBUF_LIMITED):
        return None
    width = 4 if family == socket.AF_INET else 16
    return Connection(
        local=_address(ends[4 : 4 + width]),
        remote=_address(ends[20 : 20 + width]),
        ports=struct.unpack_from("!HH", ends),
        bytes=_number(info, _BYTES_ACKED),
        busy=_number(info, _BUSY_TIME),
        receiver_limited=_number(info, _RWND_LIMITED),
        buffer_limited=_number(info, _SNDBUF_LIMITED),
        min_rtt=_number(info, _MIN_RTT),
        retransmits=_number(info, _TOTAL_RETRANS),
    )


def _attribute(rest: bytes, wanted: int) -> bytes:
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if size < _ATTRIBUTE.size:
            break
        if kind == wanted:
            return rest[_ATTRIBUTE.size : size]
        rest = rest[(size + 3) & ~3 :]
    return b""


def _number(info: bytes, place: tuple[int, int]) -> int:
    return int.from_bytes(info[place[0] : sum(place)], "little" if _LITTLE else "big")


_LITTLE = struct.pack("=H", 1) == struct.pack("<H", 1)


@lru_cache(4096)
def _address(packed: bytes) -> str:
    """IPv4 connections of IPv6 sockets as what they are."""
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


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
            found = sockets()
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
            one = parse(body) if self._mine.get(inode) else None
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

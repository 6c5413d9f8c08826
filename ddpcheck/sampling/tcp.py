"""TCP statistics of the ranks' connections, by pair of addresses, from the kernel (`sock_diag(7)`).

Needs no subprocess and no privileges. The numbers are those of `ss -ti`.
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
_INODE = struct.Struct("=I")  # the last field of the message
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2  # the attribute that holds struct tcp_info
# Established and half closed: sent bytes count until the connection is closed.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9))
# Offset and size of fields of struct tcp_info, which is only ever extended at its end.
_BYTES_ACKED = (120, 8)
_TOTAL_RETRANS = (100, 4)
_MIN_RTT = (148, 4)
_BUSY_TIME = (168, 8)
_RWND_LIMITED = (176, 8)
_SNDBUF_LIMITED = (184, 8)
_ANSWER_SECONDS = 1.0
_LITTLE = struct.pack("=H", 1) == struct.pack("<H", 1)
# Acknowledged bytes; microseconds limited by the network; microseconds with data to send; retransmits; minimum
# round-trip time in microseconds; open connections.
ROUTE_FIELDS = ("bytes", "network_busy", "busy", "retransmits", "min_rtt", "connections")
# Thousands of ranks may have connections to all others, but send gradients to few of them.
MAX_ROUTES = 32
# Less traffic, such as that of the store, says nothing about a link.
MIN_ROUTE_BYTES = 1 << 20
# Minimum bytes between two readings, absolute and relative to the busiest connection between the same addresses. Less
# is traffic of the store or small control messages, whose busy time includes the queue before them: they would make a
# nearly idle link look busy.
MIN_INCREASE = 16 << 10
MIN_SHARE_OF_BUSIEST = 0.1
# Maximum share of one core for reading connections, if there are very many.
MAX_CPU_SHARE = 0.004


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection; times in microseconds since it was opened."""

    local: str
    remote: str
    ports: tuple[int, int]
    # Sent bytes that the other end has acknowledged.
    bytes: int
    # Time with unsent or unacknowledged data, and the parts of it that the network did not cause: the receive window
    # was full, or the send buffer too small.
    busy: int
    receiver_limited: int
    buffer_limited: int
    min_rtt: int
    retransmits: int


def dump_sockets() -> dict[int, bytes]:
    """The kernel's message for each connection, by inode, for `parse`. Raises OSError if the kernel refuses.

    The messages are parsed later: most of thousands of connections do not belong to ranks.
    """
    result: dict[int, bytes] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.closing(_dump_family(family)) as answers:
            result.update(answers)
    return result


def _dump_family(family: int) -> Generator[tuple[int, bytes], None, None]:
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as netlink:
        netlink.settimeout(_ANSWER_SECONDS)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES, bytes(48))
        size = _HEADER.size + len(request)
        netlink.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + request)
        while True:
            answer = netlink.recv(1 << 16)
            for kind, body in messages(answer):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                if len(body) >= _MESSAGE.size:
                    yield _INODE.unpack_from(body, _MESSAGE.size - _INODE.size)[0], body


def messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """The Netlink messages in `answer`: kind and body."""
    while len(answer) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(answer)
        if size < _HEADER.size:
            return
        yield kind, answer[_HEADER.size : size]
        answer = answer[(size + 3) & ~3 :]


def parse(body: bytes) -> Connection | None:
    """None if the kernel provides no statistics of the connection."""
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


def _number(info: bytes, span: tuple[int, int]) -> int:
    return int.from_bytes(info[span[0] : sum(span)], "little" if _LITTLE else "big")


@lru_cache(4096)
def _address(packed: bytes) -> str:
    """The address as text; IPv4-mapped IPv6 addresses as IPv4."""
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass
class _Route:
    """Totals of all connections between two addresses, including closed ones."""

    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    last: dict[int, list[int]] = field(default_factory=dict)
    min_rtt: int = 0

    def add(self, connections: Mapping[int, Connection]) -> None:
        """Add one reading. Parallel connections share the link: their bytes add up, their times do not."""
        counts = {inode: _counts(one) for inode, one in connections.items()}
        increases = [_increase(self.last.get(inode), row) for inode, row in counts.items()]
        self.last = counts
        threshold = max(MIN_INCREASE, MIN_SHARE_OF_BUSIEST * max((row[0] for row in increases), default=0))
        carrying = [row for row in increases if row[0] >= threshold]
        if carrying:
            sent, network_busy, busy, retransmits = zip(*carrying, strict=True)
            increase = sum(sent), max(network_busy), max(busy), sum(retransmits)
            self.sums = [a + b for a, b in zip(self.sums, increase, strict=True)]
        round_trips = [one.min_rtt for one in connections.values() if one.min_rtt]
        self.min_rtt = min([*round_trips, self.min_rtt or max(round_trips, default=0)])

    def totals(self) -> list[int]:
        return [*self.sums, self.min_rtt, len(self.last)]


class Connections:
    """Totals by local and remote address. Connections within one address use no network and are excluded."""

    def __init__(self) -> None:
        self._routes: dict[tuple[str, str], _Route] = {}
        # Whether a socket belongs to a rank, and the processes for which this was determined.
        self._of_ranks: dict[int, bool] = {}
        self._pids: frozenset[int] = frozenset()
        # Time of the next reading; infinity if the kernel refuses.
        self._next = 0.0

    def read(self, pids: Iterable[int]) -> dict[str, list[int]]:
        """By "local remote", in the order of `ROUTE_FIELDS`; empty if the next reading is not due."""
        known = frozenset(pids)
        if time.monotonic() < self._next or not (known or self._routes):
            return {}
        began = time.thread_time()
        try:
            messages_by_inode = dump_sockets()
        except OSError:
            self._next = float("inf")  # a kernel or sandbox that refuses once will refuse again
            return {}
        self._assign_sockets(messages_by_inode, known)
        self._add_reading(messages_by_inode)
        self._next = time.monotonic() + (time.thread_time() - began) / MAX_CPU_SHARE
        return self._busiest()

    def _assign_sockets(self, messages_by_inode: dict[int, bytes], pids: frozenset[int]) -> None:
        """Determine which sockets belong to ranks. A socket that once belonged to a rank keeps belonging to it."""
        if pids == self._pids and messages_by_inode.keys() <= self._of_ranks.keys():
            return
        self._pids = pids
        held = {inode for pid in pids for inode in _sockets(pid)}
        self._of_ranks = {
            inode: inode in held or self._of_ranks.get(inode, False) for inode in messages_by_inode
        }

    def _add_reading(self, messages_by_inode: dict[int, bytes]) -> None:
        by_route: dict[tuple[str, str], dict[int, Connection]] = {pair: {} for pair in self._routes}
        for inode, body in messages_by_inode.items():
            one = parse(body) if self._of_ranks.get(inode) else None
            if one is not None and one.local != one.remote:
                by_route.setdefault((one.local, one.remote), {})[inode] = one
        for pair, connections in by_route.items():
            self._routes.setdefault(pair, _Route()).add(connections)

    def _busiest(self) -> dict[str, list[int]]:
        rows = [(pair, route.totals()) for pair, route in self._routes.items()]
        busiest = sorted((row for row in rows if row[1][0] >= MIN_ROUTE_BYTES), key=lambda row: -row[1][0])
        return {" ".join(pair): totals for pair, totals in busiest[:MAX_ROUTES]}


def _counts(one: Connection) -> list[int]:
    not_network = min(one.busy, one.receiver_limited + one.buffer_limited)
    return [one.bytes, one.busy - not_network, one.busy, one.retransmits]


def _increase(before: list[int] | None, now: list[int]) -> list[int]:
    """The increase since the last reading, or since the connection was opened. Inode numbers may be reused."""
    if before is None or now[0] < before[0]:
        return now
    return [max(0, b - a) for a, b in zip(before, now, strict=True)]


def _sockets(pid: int) -> set[int]:
    """Inodes of the open sockets of a process."""
    folder = f"/proc/{pid}/fd"
    inodes: set[int] = set()
    try:
        names = os.listdir(folder)
    except OSError:
        return inodes
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes

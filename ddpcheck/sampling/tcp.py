"""Asks the kernel for this network namespace's TCP connections and what it keeps of each (`sock_diag(7)`).

No process is started for it and no right is needed. The numbers are those that `ss -ti` shows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
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

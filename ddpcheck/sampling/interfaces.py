"""Bytes, errors and drops of every network interface, as the kernel counts them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from typing import Any

from ddpcheck.sampling.counters import CounterTotals

# /proc/net is that of the process: each launcher sees the network namespace that it runs in.
_COUNTERS = "/proc/self/net/dev"
# Of the columns behind an interface's name: bytes, packets, errs, drop, … received and then the same sent.
_COLUMNS = {
    "received": 0,
    "sent": 8,
    "receive_errors": 2,
    "send_errors": 10,
    "receive_drops": 3,
    "send_drops": 11,
}
NAMES = tuple(_COLUMNS)

Reading = dict[str, list[int]]


class Interfaces:
    """Totals since the first reading, in the order of `NAMES`."""

    def __init__(self) -> None:
        self._totals = CounterTotals()

    def read(self) -> Reading:
        return {
            name: [
                self._totals.add((name, column), value) for column, value in zip(NAMES, values, strict=True)
            ]
            for name, values in parse(counters_text()).items()
        }


def parse(text: str) -> Reading:
    """The counters by interface; lines of another shape are passed over."""
    found: Reading = {}
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        columns = numbers.split()
        if colon and len(columns) >= 16 and all(column.isdigit() for column in columns):
            found[name.strip()] = [int(columns[place]) for place in _COLUMNS.values()]
    return found


def counters_text() -> str:
    try:
        with open(_COUNTERS) as file:
            return file.read()
    except OSError:
        return ""


_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCGIFMTU, _SIOCETHTOOL = (
    0x8912,
    0x8913,
    0x891B,
    0x8921,
    0x8946,
)
_IFF_LOOPBACK, _IFF_RUNNING = 0x8, 0x40
_ETHTOOL_GSET, _ETHTOOL_GDRVINFO = 0x1, 0x3
_UNKNOWN_SPEED = (0, 0xFFFFFFFF, 0xFFFF)
_IFREQ = 40  # bytes of a struct ifreq
_IPV6_ADDRESSES = "/proc/self/net/if_inet6"
_GLOBAL_SCOPE = "00"
# Drivers of interfaces that are only memory, and the speeds they show without knowing any. A tap's can be set.
_MADE_UP: dict[str, tuple[int, ...] | None] = {
    "veth": None,
    "bridge": None,
    "dummy": None,
    "tun": (10, 10000),
}


def describe() -> list[dict[str, Any]]:
    """One entry for each interface, in the kernel's order."""
    names = list(parse(counters_text()))
    try:
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    except OSError:
        return [{"name": name} for name in names]
    with asking:
        addresses = _addresses(asking)
        return [_describe(asking, name, addresses.get(name, [])) for name in names]


def _describe(asking: socket.socket, name: str, addresses: list[str]) -> dict[str, Any]:
    flags = _flags(asking, name)
    driver = _driver(asking, name)
    return {
        "name": name,
        "class": "loopback" if flags & _IFF_LOOPBACK else "network",
        "running": bool(flags & _IFF_RUNNING),
        "driver": driver,
        # In Mbit/s, as the kernel counts it; None where nobody knows.
        "speed": believed(driver, _speed(asking, name)),
        "mtu": _mtu(asking, name),
        "addresses": addresses,
    }


def believed(driver: str, speed: int | None) -> int | None:
    """The speed, unless the driver says the same of every interface."""
    if driver not in _MADE_UP:
        return speed
    made_up = _MADE_UP[driver]
    return None if made_up is None or speed in made_up else speed


def _mtu(asking: socket.socket, name: str) -> int | None:
    """Bytes of the largest packet."""
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFMTU, struct.pack(f"16s{_IFREQ - 16}x", name.encode()))
        return int(struct.unpack_from("i", answer, 16)[0])
    return None


def _flags(asking: socket.socket, name: str) -> int:
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFFLAGS, struct.pack(f"16s{_IFREQ - 16}x", name.encode()))
        return int(struct.unpack_from("H", answer, 16)[0])
    return 0


def _driver(asking: socket.socket, name: str) -> str:
    answer = _ethtool(asking, name, struct.pack("=I", _ETHTOOL_GDRVINFO) + bytes(256))
    return answer[4:36].split(b"\0")[0].decode(errors="replace") if answer else ""


def _speed(asking: socket.socket, name: str) -> int | None:
    answer = _ethtool(asking, name, struct.pack("=I", _ETHTOOL_GSET) + bytes(40))
    if answer is None:
        return None
    # struct ethtool_cmd keeps the speed in two halves.
    low, high = struct.unpack_from("=H", answer, 12)[0], struct.unpack_from("=H", answer, 28)[0]
    speed = high << 16 | low
    return None if speed in _UNKNOWN_SPEED else int(speed)


def _ethtool(asking: socket.socket, name: str, question: bytes) -> bytes | None:
    room = array.array("B", question)
    request = struct.pack("16sP", name.encode(), room.buffer_info()[0])
    try:
        fcntl.ioctl(asking, _SIOCETHTOOL, request.ljust(_IFREQ, b"\0"))
    except OSError:
        return None
    return room.tobytes()


def _addresses(asking: socket.socket) -> dict[str, list[str]]:
    """By interface, with the length of the network's prefix: "10.0.0.1/24"."""
    found: dict[str, list[str]] = {}
    for label, address in _ipv4(asking):
        # An alias ("eth0:1") is an address of its interface.
        found.setdefault(label.partition(":")[0], []).append(f"{address}/{_prefix(asking, label, address)}")
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def _ipv4(asking: socket.socket) -> list[tuple[str, str]]:
    room = array.array("B", bytes(_IFREQ * 256))
    request = struct.pack("iP", len(room), room.buffer_info()[0])
    try:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, request)
    except OSError:
        return []
    used = struct.unpack_from("i", answer)[0]
    raw = room.tobytes()[:used]
    rows = [raw[start : start + _IFREQ] for start in range(0, used, _IFREQ)]
    return [(row[:16].split(b"\0")[0].decode(), socket.inet_ntoa(row[20:24])) for row in rows]


def _prefix(asking: socket.socket, label: str, address: str) -> int:
    request = struct.pack("16sHH4s", label.encode(), socket.AF_INET, 0, socket.inet_aton(address))
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFNETMASK, request.ljust(_IFREQ, b"\0"))
        return int.from_bytes(answer[20:24], "big").bit_count()
    return 32


def _ipv6() -> list[tuple[str, str]]:
    """Those that reach beyond the link."""
    try:
        with open(_IPV6_ADDRESSES) as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    return [
        (row[5], f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}/{int(row[2], 16)}")
        for row in rows
        if len(row) == 6 and row[3] == _GLOBAL_SCOPE
    ]

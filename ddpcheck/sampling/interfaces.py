"""Counters and properties of all network interfaces and InfiniBand ports."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Hashable
from pathlib import Path
from typing import Any

BITS = 64


class CounterTotals:
    """Totals of many counters since their first readings."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._total: dict[Hashable, int] = {}

    def add(self, key: Hashable, reading: int, bits: int = BITS) -> int:
        """Add a reading of a counter with `bits` bits; the total so far, 0 at the first reading."""
        last = self._last.get(key)
        self._last[key] = reading
        self._total[key] = self._total.get(key, 0) + (0 if last is None else increase(last, reading, bits))
        return self._total[key]

    def total(self, key: Hashable) -> int:
        return self._total.get(key, 0)


def increase(last: int, reading: int, bits: int = BITS) -> int:
    """The increase of a counter between two readings.

    A smaller reading means a wrap-around, or a reset of the device to 0. If a wrap-around would mean an increase of
    less than half the range, it is one. Otherwise it is a reset, and the reading is the increase since then.
    """
    if reading >= last:
        return reading - last
    wrapped = reading - last + (1 << bits)
    return wrapped if 0 <= wrapped < 1 << (bits - 1) else reading


ROOT = Path("/sys/class/infiniband")
# The data counters count 4-byte words.
_WORD = 4
_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards")
# Many drivers provide only 32 bits of this counter.
_WAIT, _WAIT_BITS = "port_xmit_wait", 32


class InfinibandPorts:
    """Totals since the first reading, by "device/port": received and sent bytes, errors, ticks waited."""

    def __init__(self, root: Path = ROOT) -> None:
        self._ports = {f"{port.parents[1].name}/{port.name}": port for port in sorted(root.glob("*/ports/*"))}
        self._totals = CounterTotals()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "speed": _infiniband_speed(_text(port / "rate")),
                "state": _text(port / "state").partition(":")[2].strip(),
                "layer": _text(port / "link_layer"),
            }
            for name, port in self._ports.items()
        ]

    def read(self) -> dict[str, list[int]]:
        return {name: self._read(name, port / "counters") for name, port in self._ports.items()}

    def _read(self, name: str, counters: Path) -> list[int]:
        received = self._totals.add((name, "received"), _number(counters / "port_rcv_data"))
        sent = self._totals.add((name, "sent"), _number(counters / "port_xmit_data"))
        errors = sum(self._totals.add((name, error), _number(counters / error)) for error in _ERRORS)
        waited = self._totals.add((name, _WAIT), _number(counters / _WAIT), _WAIT_BITS)
        return [received * _WORD, sent * _WORD, errors, waited]


def _infiniband_speed(rate: str) -> int | None:
    """In Mbit/s, from "100 Gb/sec (4X EDR)"."""
    number = rate.split(" ")[0]
    return int(float(number) * 1000) if number.replace(".", "", 1).isdigit() else None


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# Shows the network namespace of this process.
_COUNTERS = "/proc/self/net/dev"
# Columns after the interface name: bytes, packets, errs, drop, … received, then the same for sent.
_COLUMNS = {
    "received": 0,
    "sent": 8,
    "receive_errors": 2,
    "send_errors": 10,
    "receive_drops": 3,
    "send_drops": 11,
}
COUNTER_NAMES = tuple(_COLUMNS)

Reading = dict[str, list[int]]

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
# Drivers of virtual interfaces, and the speeds that they report without meaning (None: all). A tap's can be set.
_FICTITIOUS_SPEEDS: dict[str, tuple[int, ...] | None] = {
    "veth": None,
    "bridge": None,
    "dummy": None,
    "tun": (10, 10000),
}


class Interfaces:
    """Totals since the first reading, in the order of `COUNTER_NAMES`."""

    def __init__(self) -> None:
        self._totals = CounterTotals()

    def read(self) -> Reading:
        return {
            name: [
                self._totals.add((name, column), value)
                for column, value in zip(COUNTER_NAMES, values, strict=True)
            ]
            for name, values in parse(counters_text()).items()
        }


def parse(text: str) -> Reading:
    """The counters by interface. Lines with another format are skipped."""
    counters: Reading = {}
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        columns = numbers.split()
        if colon and len(columns) >= 16 and all(column.isdigit() for column in columns):
            counters[name.strip()] = [int(columns[index]) for index in _COLUMNS.values()]
    return counters


def counters_text() -> str:
    try:
        with open(_COUNTERS) as file:
            return file.read()
    except OSError:
        return ""


def describe() -> list[dict[str, Any]]:
    """One entry for each interface, in the kernel's order."""
    names = list(parse(counters_text()))
    try:
        query_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    except OSError:
        return [{"name": name} for name in names]
    with query_socket:
        addresses = _addresses(query_socket)
        return [_describe(query_socket, name, addresses.get(name, [])) for name in names]


def _describe(query_socket: socket.socket, name: str, addresses: list[str]) -> dict[str, Any]:
    flags = _flags(query_socket, name)
    driver = _driver(query_socket, name)
    return {
        "name": name,
        "class": "loopback" if flags & _IFF_LOOPBACK else "network",
        "running": bool(flags & _IFF_RUNNING),
        "driver": driver,
        # In Mbit/s; None if unknown.
        "speed": plausible_speed(driver, _speed(query_socket, name)),
        "mtu": _mtu(query_socket, name),
        "addresses": addresses,
    }


def plausible_speed(driver: str, speed: int | None) -> int | None:
    """The speed, or None if the driver reports a constant for every interface."""
    if driver not in _FICTITIOUS_SPEEDS:
        return speed
    fictitious = _FICTITIOUS_SPEEDS[driver]
    return None if fictitious is None or speed in fictitious else speed


def _mtu(query_socket: socket.socket, name: str) -> int | None:
    """Maximum packet size in bytes."""
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(query_socket, _SIOCGIFMTU, struct.pack(f"16s{_IFREQ - 16}x", name.encode()))
        return int(struct.unpack_from("i", answer, 16)[0])
    return None


def _flags(query_socket: socket.socket, name: str) -> int:
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(query_socket, _SIOCGIFFLAGS, struct.pack(f"16s{_IFREQ - 16}x", name.encode()))
        return int(struct.unpack_from("H", answer, 16)[0])
    return 0


def _driver(query_socket: socket.socket, name: str) -> str:
    answer = _ethtool(query_socket, name, struct.pack("=I", _ETHTOOL_GDRVINFO) + bytes(256))
    return answer[4:36].split(b"\0")[0].decode(errors="replace") if answer else ""


def _speed(query_socket: socket.socket, name: str) -> int | None:
    answer = _ethtool(query_socket, name, struct.pack("=I", _ETHTOOL_GSET) + bytes(40))
    if answer is None:
        return None
    # struct ethtool_cmd stores the speed in two 16-bit halves.
    low, high = struct.unpack_from("=H", answer, 12)[0], struct.unpack_from("=H", answer, 28)[0]
    speed = high << 16 | low
    return None if speed in _UNKNOWN_SPEED else int(speed)


def _ethtool(query_socket: socket.socket, name: str, request: bytes) -> bytes | None:
    buffer = array.array("B", request)
    ifreq = struct.pack("16sP", name.encode(), buffer.buffer_info()[0])
    try:
        fcntl.ioctl(query_socket, _SIOCETHTOOL, ifreq.ljust(_IFREQ, b"\0"))
    except OSError:
        return None
    return buffer.tobytes()


def _addresses(query_socket: socket.socket) -> dict[str, list[str]]:
    """Addresses by interface, with the prefix length: "10.0.0.1/24"."""
    addresses: dict[str, list[str]] = {}
    for label, address in _ipv4(query_socket):
        # An alias ("eth0:1") belongs to its interface.
        addresses.setdefault(label.partition(":")[0], []).append(
            f"{address}/{_prefix(query_socket, label, address)}"
        )
    for name, address in _ipv6():
        addresses.setdefault(name, []).append(address)
    return addresses


def _ipv4(query_socket: socket.socket) -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ * 256))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    try:
        answer = fcntl.ioctl(query_socket, _SIOCGIFCONF, request)
    except OSError:
        return []
    used = struct.unpack_from("i", answer)[0]
    raw = buffer.tobytes()[:used]
    rows = [raw[start : start + _IFREQ] for start in range(0, used, _IFREQ)]
    return [(row[:16].split(b"\0")[0].decode(), socket.inet_ntoa(row[20:24])) for row in rows]


def _prefix(query_socket: socket.socket, label: str, address: str) -> int:
    request = struct.pack("16sHH4s", label.encode(), socket.AF_INET, 0, socket.inet_aton(address))
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(query_socket, _SIOCGIFNETMASK, request.ljust(_IFREQ, b"\0"))
        return int.from_bytes(answer[20:24], "big").bit_count()
    return 32


def _ipv6() -> list[tuple[str, str]]:
    """Addresses with global scope."""
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

"""Networks of TAP interfaces, whose speed can be set and read like that of a real network card.

A veth has no speed of its own. A thread carries the frames between the TAPs of one network, like a switch.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from tests.lab.network import LabError, ip

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _SIOCETHTOOL = 0x400454CA, 0x8946
_TAP, _NO_HEADER = 0x2, 0x1000
_GSET, _SSET = 0x1, 0x2
# Large frames: fewer of them cost the switch less.
_MTU = 60000
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def tap_network(
    namespaces: Sequence[str], name: str, addresses: Sequence[str], megabits: int
) -> Iterator[None]:
    """An interface of that name and speed in every namespace, all on one network."""
    if not os.path.exists(_DEVICE):
        raise LabError(f"{_DEVICE} does not exist, so no interfaces can be made")
    taps: list[int] = []
    over = threading.Event()
    switch = threading.Thread(target=_carry, args=(taps, over), daemon=True)
    try:
        for namespace, address in zip(namespaces, addresses, strict=True):
            taps.append(_in_namespace(namespace, lambda: _make_tap(name, megabits)))
            ip("-n", namespace, "link", "set", name, "mtu", str(_MTU), "up")
            ip("-n", namespace, "address", "add", address, "dev", name)
        switch.start()
        yield
    finally:
        over.set()
        if switch.ident is not None:
            switch.join()
        for tap in taps:
            os.close(tap)


def _carry(taps: Sequence[int], over: threading.Event) -> None:
    """Send every frame to all others: with few hosts a switch need not learn addresses."""
    while not over.is_set():
        ready, _, _ = select.select(taps, [], [], 0.1)
        for source in ready:
            with contextlib.suppress(BlockingIOError, OSError):
                frame = os.read(source, _MTU + 64)
                for tap in taps:
                    if tap != source:
                        os.write(tap, frame)


def _make_tap(name: str, speed: int) -> int:
    tap = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        known = bytearray(_ethtool(asking, name, struct.pack("=I", _GSET) + bytes(40)))
        known[0:4] = struct.pack("=I", _SSET)
        known[12:14] = struct.pack("=H", speed & 0xFFFF)
        known[28:30] = struct.pack("=H", speed >> 16)
        _ethtool(asking, name, bytes(known))
    return tap


def _ethtool(asking: socket.socket, name: str, question: bytes) -> bytes:
    room = array.array("B", question)
    request = struct.pack("16sP", name.encode(), room.buffer_info()[0])
    fcntl.ioctl(asking, _SIOCETHTOOL, request.ljust(40, b"\0"))
    return room.tobytes()


def _in_namespace(name: str, make: Callable[[], int]) -> int:
    """Call `make` in a thread that has entered the namespace: a TAP belongs to the namespace where it was made."""
    made: list[int] = []

    def over_there() -> None:
        with open(f"/var/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        made.append(make())

    thread = threading.Thread(target=over_there)
    thread.start()
    thread.join()
    if not made:
        raise LabError(f"no interface could be made in {name}")
    return made[0]

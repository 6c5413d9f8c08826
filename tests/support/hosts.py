"""Several hosts on one machine: network namespaces with names, addresses and interfaces of their own.

The interfaces are taps, whose speed can be set as that of a real card can be read. A thread carries the frames
between the taps of one network, as a switch would. Needs root.
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
import subprocess
import threading
from collections.abc import Callable, Sequence

_TUNSETIFF, _SIOCETHTOOL = 0x400454CA, 0x8946
_TAP, _NO_HEADER = 0x2, 0x1000
_GSET, _SSET = 0x1, 0x2
# Large frames: the fewer there are, the less the switch costs.
_MTU = 60000
_CLONE_NEWNET = 0x40000000


def possible() -> bool:
    """Whether this process may make namespaces and taps."""
    name = f"ddpcheck-try-{os.getpid()}"
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or _ip("netns", "add", name):
        return False
    return _ip("netns", "del", name) == 0


class Hosts:
    """`count` hosts on networks of the given speeds (Mbit/s): network k is interface net<k>, 10.88.<k>.<host + 1>."""

    def __init__(self, count: int, speeds: Sequence[int] = (1000,)) -> None:
        self.count = count
        self._names = [f"ddpcheck-{os.getpid()}-{host}" for host in range(count)]
        self._speeds = speeds
        self._taps: list[list[int]] = []
        self._over = threading.Event()
        self._switches: list[threading.Thread] = []

    def __enter__(self) -> Hosts:
        try:
            for name in self._names:
                _must("netns", "add", name)
                _must("-n", name, "link", "set", "lo", "up")
            for network, speed in enumerate(self._speeds):
                self._taps.append([self._plug(host, network, speed) for host in range(self.count)])
                switch = threading.Thread(target=self._carry, args=(self._taps[-1],), daemon=True)
                self._switches.append(switch)
                switch.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for switch in self._switches:
            switch.join()
        for tap in (tap for taps in self._taps for tap in taps):
            os.close(tap)
        for name in self._names:
            _ip("netns", "del", name)

    def address(self, host: int, network: int = 0) -> str:
        return f"10.88.{network}.{host + 1}"

    def command(self, host: int, *command: object) -> list[str]:
        """The command, to be run on a host under the name "node<host>"."""
        named = f'hostname node{host} && exec "$@"'
        inside = ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c", named, "sh"]
        return [*inside, *map(str, command)]

    def _plug(self, host: int, network: int, speed: int) -> int:
        name = f"net{network}"
        tap = _in_namespace(self._names[host], lambda: _make_tap(name, speed))
        _must("-n", self._names[host], "link", "set", name, "mtu", str(_MTU), "up")
        _must("-n", self._names[host], "addr", "add", f"{self.address(host, network)}/24", "dev", name)
        return tap

    def _carry(self, taps: list[int]) -> None:
        """Every frame to all others: with few hosts a switch need not learn who is where."""
        while not self._over.is_set():
            ready, _, _ = select.select(taps, [], [], 0.1)
            for source in ready:
                with contextlib.suppress(BlockingIOError, OSError):
                    frame = os.read(source, _MTU + 64)
                    for tap in taps:
                        if tap != source:
                            os.write(tap, frame)


def _make_tap(name: str, speed: int) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
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
    fcntl.ioctl(
        asking, _SIOCETHTOOL, struct.pack("16sP", name.encode(), room.buffer_info()[0]).ljust(40, b"\0")
    )
    return room.tobytes()


def _in_namespace(name: str, make: Callable[[], int]) -> int:
    """Call `make` on a thread that has gone over to the namespace: a tap belongs to where it was made."""
    made: list[int] = []

    def over_there() -> None:
        with open(f"/var/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        made.append(make())

    thread = threading.Thread(target=over_there)
    thread.start()
    thread.join()
    return made[0]


def _ip(*arguments: str) -> int:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return 127


def _must(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

"""A link between two network namespaces that delays every packet, for kernels without netem.

    python benchmarks/delayed_link_job.py DEVICE SECONDS HOST HOST   # as root; prints "ready", forwards until stopped

Makes a TUN device of that name in each namespace. `tc` on the devices limits the bandwidth.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_SET_DEVICE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_NETWORK = 0x40000000  # CLONE_NEWNET
_LARGEST = 1 << 16


def opened_in(host: str, device: str) -> int:
    """A TUN device in that namespace, from this process."""
    with open(f"/var/run/netns/{host}") as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _SET_DEVICE, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
    return tun


def carry(ends: tuple[int, int], seconds: float) -> None:
    """Whatever comes in at one end goes out at the other, so many seconds later, in order."""
    other = dict(zip(ends, reversed(ends), strict=True))
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, (), (), wait)[0]:
            under_way.append((time.monotonic() + seconds, other[end], os.read(end, _LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    device, seconds, *hosts = sys.argv[1:]
    # High priority: a packet that waits for a CPU would add to the delay.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    first, second = (opened_in(host, device) for host in hosts)
    print("ready", flush=True)
    carry((first, second), float(seconds))

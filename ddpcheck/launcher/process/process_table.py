"""Processes as /proc shows them."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

# struct pidfd_info of linux/pidfd.h: a mask, identities that are of no interest here, and the wait status.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC040FF0B


@dataclass(frozen=True)
class Process:
    """One process. `started` is in clock ticks since boot: with the pid it names a process for good."""

    pid: int
    parent: int
    state: str
    started: int
    name: str

    @property
    def is_gone(self) -> bool:
        """Dead, though perhaps not yet reaped."""
        return self.state in {"Z", "X", "x"}


def read_process(pid: int) -> Process | None:
    """The process with this id, or None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
        # The name stands in brackets and may hold brackets and spaces itself.
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        return Process(pid, int(fields[1]), fields[0], int(fields[19]), name)
    except (OSError, ValueError, IndexError):
        return None


def ending_signal(pid: int, descriptor: int | None = None) -> int | None:
    """Which signal ended a process, 0 where none did; None where it is not over or nobody can tell any more.

    Its parent may have waited for it already: then only a descriptor opened before that still knows, and only
    on a young kernel.
    """
    status = _zombie_status(pid)
    if status is None and descriptor is not None:
        status = _reaped_status(descriptor)
    return None if status is None else status & 0x7F


def _zombie_status(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[49]) if fields[0] in (b"Z", b"X") else None
    except (OSError, ValueError, IndexError):
        return None


def _reaped_status(descriptor: int) -> int | None:
    """By PIDFD_GET_INFO, which tells of the end of a process since Linux 6.15."""
    answer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = _PIDFD_INFO.unpack(answer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def process_start(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: tells it from a later one with the same id."""
    process = read_process(pid)
    return None if process is None else process.started


def descendants(
    root: int, spare: Iterable[int] = (), among: Iterable[Process] | None = None
) -> list[Process]:
    """All processes under `root`, zombies too, without those in `spare` and what is under them.

    `among`: the processes to look at, where several questions are put to one table.
    """
    children: dict[int, list[Process]] = defaultdict(list)
    for process in all_processes() if among is None else among:
        children[process.parent].append(process)
    spared = set(spare)
    found: list[Process] = []
    todo = [root]
    while todo:
        for process in children.pop(todo.pop(), []):
            if process.pid not in spared:
                found.append(process)
                todo.append(process.pid)
    return found


def all_processes() -> list[Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    processes = (read_process(int(name)) for name in names if name.isdigit())
    return [process for process in processes if process is not None]

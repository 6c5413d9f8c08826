"""Memory and input/output of the ranks of this node, as /proc shows them."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Bytes that came from or went to storage: what the page cache served is not in them.
_STORAGE = ("read_bytes", "write_bytes")


class RankProcesses:
    """The ranks that the launcher has met so far."""

    def __init__(self) -> None:
        self._namespace = network_namespace()
        self._pids: dict[int, int] = {}
        # Ranks arrive on the launcher's thread; a dictionary must not grow while it is gone through.
        self._met: list[tuple[int, int]] = []

    def add(self, rank: int, pid: int) -> None:
        self._met.append((rank, pid))

    def read(self) -> dict[str, list[int]]:
        """By rank: process id, resident bytes, bytes read from storage, bytes written to it."""
        while self._met:
            rank, pid = self._met.pop(0)
            # Two launchers on one host, as in a rehearsal of several nodes: each has its own namespace.
            if network_namespace(pid) in ("", self._namespace):
                self._pids[rank] = pid
        found = {}
        for rank, pid in list(self._pids.items()):
            resident = _resident(pid)
            if resident is None:
                del self._pids[rank]
                continue
            found[str(rank)] = [pid, resident, *_storage(pid)]
        return found


def network_namespace(pid: int | None = None) -> str:
    """Names the network namespace of a process; empty where that is not told."""
    try:
        return os.readlink(f"/proc/{'self' if pid is None else pid}/ns/net")
    except OSError:
        return ""


def _resident(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def _storage(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/io") as file:
            numbers = dict(line.split(": ", 1) for line in file if ": " in line)
        return [int(numbers[name]) for name in _STORAGE]
    except (OSError, ValueError, KeyError):
        return [0, 0]

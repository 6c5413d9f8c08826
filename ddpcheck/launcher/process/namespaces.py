"""Processes and threads of ranks in another namespace of process ids, as this process sees them.

In a container, a rank records the id that it has there. The kernel lists the ids of a process in all namespaces from
the reader's inwards (`NSpid` in /proc/<pid>/status).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ddpcheck.launcher.process.process_table import read_process
from ddpcheck.machine_identity import pid_namespace
from ddpcheck.records.kinds.rank import RankHeader

_PROC = Path("/proc")


class RankProcessIds:
    """Finds the processes of ranks by the ids that they recorded."""

    def __init__(self, own_namespace: str | None = None) -> None:
        self._own = pid_namespace() if own_namespace is None else own_namespace
        self._found: dict[tuple[str, int, int], int] = {}

    def is_foreign(self, header: RankHeader) -> bool:
        """Whether the rank's process id counts in another namespace than this process's."""
        return bool(header.pid_namespace and self._own) and header.pid_namespace != self._own

    def pid(self, header: RankHeader) -> int | None:
        """The process id of a rank in this process's namespace; None if its process is not visible here."""
        if not self.is_foreign(header):
            return header.pid
        key = (header.pid_namespace, header.pid, header.ticks)
        if key not in self._found:
            pid = _visible_pid(header)
            if pid is None:
                return None
            self._found[key] = pid
        return self._found[key]

    def threads(self, header: RankHeader, threads: Collection[int]) -> dict[int, int]:
        """From ids of threads that a rank recorded to their ids here."""
        pid = self.pid(header)
        if pid is None or not self.is_foreign(header):
            return {thread: thread for thread in threads}
        tasks = _PROC / str(pid) / "task"
        return {inner: outer for outer, inner in _ids(tasks) if inner in threads}


def _visible_pid(header: RankHeader) -> int | None:
    for pid, inner in _ids(_PROC):
        if inner != header.pid or _namespace(pid) != header.pid_namespace:
            continue
        process = read_process(pid)
        if process is not None and header.ticks in (0, process.started):
            return pid
    return None


def _ids(folder: Path) -> list[tuple[int, int]]:
    """Of all processes in /proc, or of all threads of one: the id here, and the innermost one."""
    try:
        names = [name for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []
    return [(int(name), inner) for name in names if (inner := _innermost(folder / name)) is not None]


def _innermost(folder: Path) -> int | None:
    try:
        for line in (folder / "status").read_text(errors="replace").splitlines():
            name, _, ids = line.partition(":")
            if name == "NSpid" and ids.split():
                return int(ids.split()[-1])
    except (OSError, ValueError):
        return None
    return None


def _namespace(pid: int) -> str:
    try:
        return os.readlink(_PROC / str(pid) / "ns" / "pid")
    except OSError:
        return ""

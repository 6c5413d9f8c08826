"""Finds the processes of a job in /proc: by a variable of their environment, by their session, by their namespace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Locked by the launcher as long as it exists.
SEGMENTS = "/dev/shm/ddpcheck-run-"


def pids() -> Iterator[int]:
    yield from map(int, filter(str.isdigit, os.listdir("/proc")))


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not: its parent may have been killed."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def session(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def has_variable(pid: int, assignment: str) -> bool:
    """Whether the environment of the process contained `NAME=value` when its program began."""
    with contextlib.suppress(OSError):
        return assignment.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def segments(pid: int) -> set[Path]:
    """The shared-memory files of ddpcheck that the process has open."""
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith(SEGMENTS):
                    found.add(Path(target))
    return found


def _stat(pid: int) -> list[str]:
    """State, parent, process group and session, and further fields."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

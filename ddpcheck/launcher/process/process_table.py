"""Processes as /proc shows them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

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


_CLOCK = "nanosleep"
# Names that gloo and torch give to their threads.
_BACKENDS = ("gloo", "pt_")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """Counters of one rank's process. What cannot be read stays at 0, and so never moves."""

    # Of the training thread: processor time in ticks, how often it went to sleep, what it sleeps in.
    thread_ticks: int = 0
    thread_switches: int = 0
    sleeps_in: str = ""
    # Of the process and all under it. Where threads are looked at, ddpcheck's own and those of the backends,
    # which look for news a hundred times a second, are left out.
    # Whether any sleeps by a clock, and so wakes by itself.
    by_clock: bool = False
    ticks: int = 0
    switches: int = 0
    bytes: int = 0


def read_activity(pid: int, thread: int, own: Collection[int], below: Iterable[Process]) -> Activity:
    """The counters of the process `pid`, its training thread `thread` and the processes `below` it."""
    folder = Path("/proc") / str(pid)
    task = folder / "task" / str(thread or pid)
    families = [folder, *(Path("/proc") / str(process.pid) for process in below)]
    return Activity(
        thread_ticks=_ticks(task / "stat"),
        thread_switches=_switches(task / "status"),
        sleeps_in=_text(task / "wchan"),
        # Children that were waited for count too: they come and go between two looks.
        ticks=sum(_ticks(family / "stat", with_children=True) for family in families),
        by_clock=any(_CLOCK in _text(task / "wchan") for family in families for task in _tasks(family, own)),
        switches=sum(_switches(task / "status") for family in families for task in _tasks(family, own)),
        bytes=sum(_bytes(family / "io") for family in families),
    )


def _tasks(folder: Path, own: Collection[int]) -> list[Path]:
    try:
        return [
            folder / "task" / name
            for name in os.listdir(folder / "task")
            if name.isdigit() and int(name) not in own and not _is_of_backend(folder / "task" / name)
        ]
    except OSError:
        return []


def _is_of_backend(task: Path) -> bool:
    return _text(task / "comm").startswith(_BACKENDS)


def _ticks(path: Path, *, with_children: bool = False) -> int:
    fields = _text(path).rpartition(")")[2].split()
    with contextlib.suppress(ValueError, IndexError):
        return sum(int(field) for field in fields[11 : 15 if with_children else 13])
    return 0


def _switches(path: Path) -> int:
    """Voluntary ones: a thread that is not waiting all the time has to wait anew now and then."""
    return _named(path, "voluntary_ctxt_switches")


def _bytes(path: Path) -> int:
    """Read and written, by files and pipes; of sockets, what most programs send."""
    return _named(path, "rchar") + _named(path, "wchar")


def _named(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

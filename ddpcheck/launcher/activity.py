"""What a process does, as /proc shows it: enough to tell one that works from one that stands still."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.launcher.process.process_table import Process

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

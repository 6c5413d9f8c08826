"""Processes and their activity counters, read from /proc."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

# struct pidfd_info of linux/pidfd.h: a mask, ids that are not needed here, and the wait status.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC040FF0B


@dataclass(frozen=True)
class Process:
    """One process. `started` is in clock ticks since boot; together with the pid it is unique."""

    pid: int
    parent: int
    state: str
    started: int
    name: str

    @property
    def is_gone(self) -> bool:
        """The process has exited; it may not be reaped yet."""
        return self.state in {"Z", "X", "x"}


def read_process(pid: int) -> Process | None:
    """The process with this id, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
        # The name is in parentheses and may itself contain parentheses and spaces.
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        return Process(pid, int(fields[1]), fields[0], int(fields[19]), name)
    except (OSError, ValueError, IndexError):
        return None


def ending_signal(pid: int, descriptor: int | None = None) -> int | None:
    """The signal that ended a process, 0 for a normal exit; None if it still runs or the status is unknown.

    After the parent has reaped it, only a descriptor that was opened earlier provides the status, on Linux 6.15 or
    newer.
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
    """By PIDFD_GET_INFO, which provides the exit status since Linux 6.15."""
    answer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, status = _PIDFD_INFO.unpack(answer)
    return int(status) if mask & _PIDFD_INFO_EXIT else None


def process_start(pid: int) -> int | None:
    """Start time in clock ticks since boot: distinguishes the process from a later one with the same id."""
    process = read_process(pid)
    return None if process is None else process.started


def descendants(
    root: int, exclude: Iterable[int] = (), among: Iterable[Process] | None = None
) -> list[Process]:
    """All descendants of `root`, including zombies, without those in `exclude` and their descendants.

    `among`: the process table to use, for callers that need several results from one table.
    """
    children: dict[int, list[Process]] = defaultdict(list)
    for process in all_processes() if among is None else among:
        children[process.parent].append(process)
    excluded = set(exclude)
    result: list[Process] = []
    pending = [root]
    while pending:
        for process in children.pop(pending.pop(), []):
            if process.pid not in excluded:
                result.append(process)
                pending.append(process.pid)
    return result


def all_processes() -> list[Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    processes = (read_process(int(name)) for name in names if name.isdigit())
    return [process for process in processes if process is not None]


# The kernel function of a thread that sleeps on a timer, and of one that waits for another thread.
_TIMER_SLEEP = "nanosleep"
FUTEX_SLEEP = "futex"
# Where the arguments of a futex call hold its timeout, by number of the call. Calls as new as these have the same
# number on all architectures; futex() itself has an older one on each.
_TIMEOUT_ARGUMENT = {"449": 4, "455": 5}
_TIMEOUT_OF_FUTEX = 4
# Prefixes of the thread names of gloo, torch, NCCL and CUDA.
_BACKEND_THREADS = ("gloo", "pt_", "NCCL", "cuda")
# Kernel functions of a thread that waits for a file lock: flock, and the locks of fcntl.
_LOCK_SLEEPS = ("locks_lock", "flock_lock", "fcntl_setlk", "posix_lock")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """Activity counters of one rank's process. Counters that cannot be read stay 0."""

    # Of the training thread: processor time in ticks, voluntary context switches, kernel function it sleeps in.
    thread_ticks: int = 0
    thread_switches: int = 0
    sleeps_in: str = ""
    # Of the process and its descendants. Counters of threads exclude those of ddpcheck and of the backends, which
    # poll a hundred times per second.
    # Whether any thread sleeps on a timer, and so wakes up by itself.
    by_clock: bool = False
    ticks: int = 0
    switches: int = 0
    bytes: int = 0
    # Whether any thread waits for another one up to a time limit: `Event.wait(timeout=...)`, `queue.get(timeout=...)`.
    # A collective of gloo waits in this way too.
    timed_wait: bool = False
    pid: int = 0
    # Whether each thread of this process but the training thread waits for another thread, without a time limit.
    others_parked: bool = True
    # The process that holds the file lock for which the training thread waits (0: none), and the file.
    lock_holder: int = 0
    lock_file: str = ""


def read_activity(pid: int, thread: int, own: Collection[int], descendants: Iterable[Process]) -> Activity:
    """The counters of the process `pid`, its training thread `thread` and its `descendants`.

    `own`: threads that are left out, such as our own.
    """
    folder = Path("/proc") / str(pid)
    task = folder / "task" / str(thread or pid)
    folders = [folder, *(Path("/proc") / str(process.pid) for process in descendants)]
    tasks = [each for process in folders for each in _tasks(process, own)]
    holder, lock_file = _lock_wait(pid, task)
    return Activity(
        thread_ticks=_ticks(task / "stat"),
        thread_switches=_switches(task / "status"),
        sleeps_in=_text(task / "wchan"),
        # Including reaped children, which may start and end between two samples.
        ticks=sum(_ticks(each / "stat", with_children=True) for each in folders),
        by_clock=any(_TIMER_SLEEP in _text(each / "wchan") for each in tasks),
        timed_wait=any(_waits_with_timeout(each) for each in {task, *tasks}),
        switches=sum(_switches(each / "status") for each in tasks),
        bytes=sum(_bytes(each / "io") for each in folders),
        pid=pid,
        others_parked=all(_is_parked(each) for each in _tasks(folder, own) if each != task),
        lock_holder=holder,
        lock_file=lock_file,
    )


def _is_parked(task: Path) -> bool:
    return FUTEX_SLEEP in _text(task / "wchan") and not _waits_with_timeout(task)


def _lock_wait(pid: int, task: Path) -> tuple[int, str]:
    """The holder of the file lock that a thread waits for, and the file; (0, "") if it waits for none.

    The kernel lists a lock with its holder first, then each process that waits for it, marked by an arrow.
    """
    if not _text(task / "wchan").startswith(_LOCK_SLEEPS):
        return 0, ""
    holders: dict[str, int] = {}
    for line in _text(Path("/proc/locks")).splitlines():
        number, *words = line.split()
        waits = words[:1] == ["->"]
        with contextlib.suppress(ValueError, IndexError):
            owner = int(words[3 + waits])
            if not waits:
                holders[number] = owner
            elif owner == pid and number in holders:
                return holders[number], _locked_file(pid, task)
    return 0, ""


def _locked_file(pid: int, task: Path) -> str:
    """By the first argument of the system call in progress, which is the file's descriptor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return os.readlink(f"/proc/{pid}/fd/{int(_text(task / 'syscall').split()[1], 16)}")
    return ""


def _tasks(folder: Path, own: Collection[int]) -> list[Path]:
    try:
        return [
            folder / "task" / name
            for name in os.listdir(folder / "task")
            if name.isdigit() and int(name) not in own and not _is_backend_thread(folder / "task" / name)
        ]
    except OSError:
        return []


def _waits_with_timeout(task: Path) -> bool:
    """Whether the thread waits for another one with a timeout. False where the kernel does not show the call."""
    if FUTEX_SLEEP not in _text(task / "wchan"):
        return False
    call = _text(task / "syscall").split()
    with contextlib.suppress(ValueError, IndexError):
        return int(call[_TIMEOUT_ARGUMENT.get(call[0], _TIMEOUT_OF_FUTEX)], 16) != 0
    return False


def _is_backend_thread(task: Path) -> bool:
    return _text(task / "comm").startswith(_BACKEND_THREADS)


def _ticks(path: Path, *, with_children: bool = False) -> int:
    fields = _text(path).rpartition(")")[2].split()
    with contextlib.suppress(ValueError, IndexError):
        return sum(int(field) for field in fields[11 : 15 if with_children else 13])
    return 0


def _switches(path: Path) -> int:
    """Voluntary context switches: a thread that works between waits has some."""
    return _field(path, "voluntary_ctxt_switches")


def _bytes(path: Path) -> int:
    """Bytes read and written through files and pipes, and most writes to sockets."""
    return _field(path, "rchar") + _field(path, "wchar")


def _field(path: Path, name: str) -> int:
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

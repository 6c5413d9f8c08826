"""Runs a command of ddpcheck in this process, and notes what damaged files must not make it do."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A command on a small run takes some 0.2 s of processor time, and the process some 150 MB.
CPU_SECONDS = 30.0
# Ends a command that waits for something.
WALL_SECONDS = 120.0
MEMORY_BYTES = 1 << 30

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events with the indices of their arguments that are paths to be changed.
_CHANGES = {
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
}
# What runs a program or code, or reaches another machine.
_EXECUTES = frozenset(
    {
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "pickle.find_class",
        "marshal.loads",
        "socket.connect",
        "ctypes.dlopen",
    }
)


class LimitError(BaseException):
    """A command has used more processor time or time than any needs."""


@dataclass
class Audit:
    """What Python's audit hook has seen while `allowed` was set."""

    allowed: tuple[str, ...] = ()
    violations: list[str] = field(default_factory=list)
    _installed: bool = False

    def install(self) -> None:
        """For good: a hook cannot be removed. Use it in a process of its own."""
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._event)

    @contextlib.contextmanager
    def only(self, *folders: Path) -> Iterator[None]:
        """Until the end of the block, files may be changed in these folders only, and nothing may be executed."""
        self.violations = []
        self.allowed = tuple(f"{folder}/" for folder in folders)
        try:
            yield
        finally:
            self.allowed = ()

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.allowed:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, str | bytes) and (
                flags & _WRITING if mode is None else set(mode) & set("wax+")
            ):
                self._check(event, path)
        elif event in _CHANGES:
            for index in _CHANGES[event]:
                self._check(event, arguments[index])
        elif event in _EXECUTES and not _is_import():
            self.violations.append(f"{event} {arguments!r:.200}")

    def _check(self, event: str, path: Any) -> None:
        text = os.path.abspath(os.fsdecode(path)) if not isinstance(path, int) else ""
        # A link counts as what it refers to where it is a folder on the way; opening one writes to its target.
        real = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text), "")
        if text and text != os.devnull and not real.startswith(self.allowed):
            self.violations.append(f"{event} {text}")


def _is_import() -> bool:
    """Whether a module is being imported, which reads compiled code and loads libraries."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


AUDIT = Audit()


@dataclass
class Called:
    """How a command ended. `wrong`: what it must not have done."""

    status: int = 0
    output: str = ""
    wrong: list[str] = field(default_factory=list)


def limit_memory() -> None:
    """For this process: much more than any command needs beyond what the process has now."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))


def call(arguments: Sequence[object], *writable: Path) -> Called:
    """`ddpcheck ARGUMENTS`. Must run on the main thread."""
    from ddpcheck.__main__ import main

    called = Called()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    handlers = {number: signal.signal(number, _out_of_time) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), AUDIT.only(*writable):
            main([str(word) for word in arguments])
    except SystemExit as leaving:
        called.status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except LimitError as error:
        called.wrong.append(f"{error}: {_where(error)}")
    except BaseException as error:
        called.wrong.append(f"{type(error).__name__}: {str(error)[:300]}: {_where(error)}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    called.wrong += AUDIT.violations
    called.output = out.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    return called


def _out_of_time(number: int, frame: object) -> None:
    raise LimitError("too much processor time" if number == signal.SIGPROF else "too much time")


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/tests/" not in frame.filename][-4:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in own)

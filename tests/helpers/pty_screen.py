"""A command on a real pseudo-terminal, with an emulated screen that shows what a user would see."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte


class PtyScreen:
    """Feeds the output of the command and its children to a terminal emulator."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        rows: int = 24,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.status: int | None = None
        self.pid, self.master = os.forkpty()
        if self.pid == 0:
            self._exec(command, cwd, rows, columns, env or {})
        self.resize(rows, columns)

    @staticmethod
    def _exec(command: Sequence[str], cwd: Path, rows: int, columns: int, env: Mapping[str, str]) -> None:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
            os.chdir(cwd)
            os.execvpe(
                command[0], list(command), {**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}
            )
        finally:
            os._exit(127)

    def resize(self, rows: int, columns: int) -> None:
        if (rows, columns) != (self.screen.lines, self.screen.columns):
            self.screen.resize(rows, columns)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float = 0.0) -> bool:
        """Read available output, waiting up to `seconds` for it; False when no process has the terminal open."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true\n" + "\n".join(self.lines())
            self.read(0.02)

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read(0.02)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self, seconds: float = 120.0) -> int:
        """Wait until the command has ended and its output is on the screen; returns its exit status."""
        end = time.monotonic() + seconds
        while self.status is None:
            assert time.monotonic() < end, "did not end\n" + "\n".join(self.lines())
            self.read(0.02)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        while select.select([self.master], [], [], 0.1)[0] and self.read():
            pass
        return self.status

    def lines(self) -> list[str]:
        """The rows of the screen."""
        return [line.rstrip() for line in self.screen.display]

    def everything(self) -> list[str]:
        """Rows that scrolled away, then the screen."""
        past = [
            "".join(row[column].data for column in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return [*past, *self.lines()]

    @property
    def region(self) -> tuple[int, int] | None:
        """First and last row of the scrolling region; None: the whole screen."""
        margins = self.screen.margins
        return None if margins is None else (margins.top, margins.bottom)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)

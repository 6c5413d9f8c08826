"""The live view: the state of the run, drawn into the last rows of the terminal below the output of the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from ddpcheck.analysis.live.tracker import LiveState, LiveTracker
from ddpcheck.analysis.run_reader import RunReader

_LFLAG = 3
# Terminals without reliable scroll regions.
_UNSUPPORTED_TERMINALS = frozenset({"", "dumb", "unknown", "emacs", "cons25"})
# Variables of environments whose terminal is a log: CI services and notebooks.
_LOG_VARIABLES = ("CI", "BUILDKITE", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION", "JPY_PARENT_PID")
_STDOUT, _STDERR = 1, 2


def live_view_enabled(requested: bool | None, quiet: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to show the live view: on a supported terminal, unless the user or the environment disables it."""
    if (
        requested is False
        or quiet
        or environ.get("TERM", "") in _UNSUPPORTED_TERMINALS
        or not os.isatty(_STDERR)
    ):
        return False
    if requested:
        return True
    # A pipe may lead to a pager, which uses the whole screen.
    return not any(environ.get(name) for name in _LOG_VARIABLES) and not _is_pipe(_STDOUT)


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class Terminal:
    """The controlling terminal, opened again: flags that the job sets on its descriptors do not affect it."""

    def __init__(self) -> None:
        # Fails unless stderr is the controlling terminal.
        os.tcgetpgrp(_STDERR)
        # One live view per terminal: a second concurrent or nested run gets none.
        self._lock_descriptor = os.open(os.ttyname(_STDERR), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_descriptor)
            raise
        self.descriptor = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self.descriptor, select.POLLOUT)

    def size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self.descriptor)
        except OSError:
            return os.terminal_size((0, 0))

    def in_foreground(self) -> bool:
        """Whether this process group is in the foreground."""
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except OSError:
            return False

    def is_in_raw_mode(self) -> bool:
        """Whether a program reads single keys, as full-screen programs and debuggers do."""
        try:
            flags = termios.tcgetattr(self.descriptor)[_LFLAG]
        except (OSError, termios.error):
            return True
        return not flags & termios.ICANON

    def write(self, data: bytes, timeout: float = 0.0) -> bool:
        """Write all data; False, with nothing written, if the terminal is stopped by Ctrl-S or its buffer is full."""
        if not any(event & select.POLLOUT for _, event in self._poller.poll(timeout * 1000)):
            return False
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._lock_descriptor)


_SAVE, _RESTORE = "\x1b7", "\x1b8"
# Resets the modes of the job that would change our text. Restoring the cursor restores them as well. The first code
# moves the cursor.
_PLAIN = "\x1b[?6l\x1b(B\x0f\x1b[m"
_WHOLE_SCREEN = "\x1b[r"
_ERASE_REST = "\x1b[J"
_ERASE_LINES_BELOW = f"\x1b[m\x1b[B\r{_ERASE_REST}"
_ERASE_LINE = "\x1b[K"
# If the terminal has just become narrower, a line that wraps would make the screen scroll.
_CUT_LINES, _WRAP_LINES = "\x1b[?7l", "\x1b[?7h"
# One row down, scrolls in the last row; unlike a newline, it keeps the column.
_DOWN = "\x1bD"

# No live view in smaller terminals.
MIN_ROWS = 12
MIN_COLUMNS = 40
_CLOSE_SECONDS = 1.0
# After a resize, the size must be stable for this long before rows are reserved again.
RESIZE_PAUSE_SECONDS = 1.0

# Gets the number of columns and returns the lines, always the same number of lines.
Draw = Callable[[int], Sequence[str]]


def reserve(rows: int, lines: Sequence[str]) -> bytes:
    """Reserve the last rows of a terminal with `rows` rows and write `lines` there.

    The line of the cursor moves up if necessary. Everything below it is erased: nothing, or our own lines from before
    a resize.
    """
    count = len(lines)
    make_room = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_DOWN * count}\x1b[{count}A"
    region = f"{_SAVE}{_ERASE_LINES_BELOW}{_PLAIN}\x1b[1;{rows - count}r"
    return f"{make_room}{region}{_draw_lines(rows, lines)}{_RESTORE}".encode()


def rewrite(rows: int, lines: Sequence[str]) -> bytes:
    """Replace the reserved lines by `lines`."""
    return f"{_SAVE}{_PLAIN}{_draw_lines(rows, lines)}{_RESTORE}".encode()


def release_rows(rows: int, count: int) -> bytes:
    """Erase our rows and make the whole screen scroll again."""
    return f"{_SAVE}{_PLAIN}{_WHOLE_SCREEN}\x1b[{rows - count + 1};1H{_ERASE_REST}{_RESTORE}".encode()


def release_rows_after_resize() -> bytes:
    """The same after a resize: our lines are at an unknown position below the cursor."""
    below = f"{_DOWN}\x1b[A{_SAVE}{_ERASE_LINES_BELOW}{_RESTORE}"
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{below}".encode()


def reset_scroll_region() -> bytes:
    """Make the whole screen scroll again without erasing: a full-screen program uses it."""
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}".encode()


def _draw_lines(rows: int, lines: Sequence[str]) -> str:
    first = rows - len(lines) + 1
    drawn = "".join(f"\x1b[{first + index};1H{line}\x1b[m{_ERASE_LINE}" for index, line in enumerate(lines))
    return f"{_CUT_LINES}{drawn}{_WRAP_LINES}"


# Exits after one byte. End of file means that ddpcheck was killed: erase its rows.
_GUARD_CODE = """
import os, sys
if not os.read(0, 1):
    rows = os.get_terminal_size(1).lines
    first = max(1, rows - int(sys.argv[1]) + 1)
    os.write(1, f"\\x1b7\\x1b[?6l\\x1b[r\\x1b[{first};1H\\x1b[J\\x1b8".encode())
"""


class TerminalGuard:
    """A process that restores the terminal if ddpcheck is killed. It has its own session, so group signals miss it."""

    def __init__(self, terminal: int, rows: int) -> None:
        read_end, self._pipe = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                # Without site and environment: no code of the user or of ddpcheck runs in it.
                [sys.executable, "-I", "-S", "-c", _GUARD_CODE, str(rows)],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read_end, 0),
                    (os.POSIX_SPAWN_DUP2, terminal, 1),
                    (os.POSIX_SPAWN_DUP2, null, 2),
                ],
                setsid=True,
                setsigmask=signal.valid_signals(),
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read_end)
            os.close(null)

    def close(self) -> None:
        """End the process; the terminal is restored already."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, b".")
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


class LivePane:
    """Context manager: the last rows of the terminal show the lines last passed to `show`.

    A thread writes to the terminal. Neither the job nor the launcher waits for it: if the terminal is blocked, a
    refresh is skipped.
    """

    def __init__(self, terminal: Terminal, height: int) -> None:
        self._terminal = terminal
        self._height = height
        # Started before the job: later children count as processes of the job.
        self._guard = TerminalGuard(terminal.descriptor, height)
        self._draw: Draw | None = None
        # The terminal size for which rows are reserved; None: no rows are reserved.
        self._reserved: os.terminal_size | None = None
        self._last_size: os.terminal_size | None = None
        self._paused_until = 0.0
        # A full-screen program was detected: the view stays off. Old lines may reappear when that program ends.
        self._given_up = False
        self._stale_lines = False
        self._hidden = False
        self._closing = False
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpcheck-live", daemon=True)

    def __enter__(self) -> LivePane:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._due.set()
        self._thread.join(_CLOSE_SECONDS)
        self.hide()
        # If the terminal is blocked, the guard restores it after ddpcheck has exited.
        if self._reserved is None:
            self._guard.close()
        if not self._thread.is_alive():
            self._terminal.close()

    def show(self, draw: Draw) -> None:
        """Show the lines that `draw` returns."""
        self._draw = draw
        self._due.set()

    def resized(self) -> None:
        """The terminal size has changed: refresh now, since the position of our rows is unknown."""
        self._due.set()

    def check_raw_mode(self) -> None:
        """Switch the view off if a full-screen program starts, and remove old lines after it has ended."""
        if (self._given_up and not self._stale_lines) or not self._terminal.in_foreground():
            return
        if self._terminal.is_in_raw_mode() != self._given_up:
            self._given_up = True
            self._due.set()

    def hide(self) -> None:
        """Restore the terminal before ddpcheck stops or exits."""
        self._hidden = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._release(_CLOSE_SECONDS)
                self._remove_stale_lines(_CLOSE_SECONDS)
            finally:
                self._lock.release()

    def unhide(self) -> None:
        """Show the view again after ddpcheck was stopped."""
        self._hidden = False
        self._due.set()

    def _run(self) -> None:
        # The main thread handles signals; here one would interrupt a write.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            self._due.wait()
            self._due.clear()
            if self._closing:
                return
            with self._lock:
                try:
                    self._refresh()
                except Exception:
                    # An error in the view must not print a traceback into the output of the job.
                    self._hidden = True
                    self._release()

    def _refresh(self) -> None:
        if self._hidden or self._draw is None:
            return
        if not self._terminal.in_foreground():
            return
        raw_mode = self._terminal.is_in_raw_mode()
        if self._given_up or raw_mode:
            self._given_up = True
            self._release()
            if not raw_mode:
                self._remove_stale_lines()
            return
        size = self._terminal.size()
        if size != self._last_size:
            # Terminals move lines while the window is being resized: pause until the size is stable.
            self._paused_until = (
                time.monotonic() + RESIZE_PAUSE_SECONDS if self._last_size is not None else 0.0
            )
            self._last_size = size
        if size != self._reserved:
            self._release()
        small = size.lines < MIN_ROWS or size.columns < MIN_COLUMNS
        if small or time.monotonic() < self._paused_until:
            return
        lines = self._draw(size.columns)
        data = reserve(size.lines, lines) if self._reserved is None else rewrite(size.lines, lines)
        if self._terminal.write(data):
            self._reserved = size

    def _release(self, timeout: float = 0.0) -> None:
        if self._reserved is None:
            return
        if self._given_up:
            # The rows belong to the full-screen program now.
            data, self._stale_lines = reset_scroll_region(), True
        elif self._terminal.size() == self._reserved:
            data = release_rows(self._reserved.lines, self._height)
        else:
            data = release_rows_after_resize()
        if self._terminal.write(data, timeout):
            self._reserved = None

    def _remove_stale_lines(self, timeout: float = 0.0) -> None:
        if self._stale_lines and self._terminal.write(release_rows_after_resize(), timeout):
            self._stale_lines = False


REFRESH_SECONDS = 0.5
# Maximum share of one core for computing the state. With a thousand ranks, the interval grows up to the maximum.
MAX_CPU_SHARE = 0.01
MAX_REFRESH_SECONDS = 10.0


class LiveView:
    """The supervisor calls `tick` regularly; the view is redrawn every REFRESH_SECONDS."""

    def __init__(self, run: RunReader, name: str, pane: LivePane) -> None:
        from rich.console import Console

        from ddpcheck.reports.terminal.live import panel_lines

        self.pane = pane
        self._tracker = LiveTracker(run, name, time.monotonic())
        self._console = Console(stderr=True)
        self._panel_lines = panel_lines
        self._next = 0.0

    def tick(self) -> None:
        self.pane.check_raw_mode()
        now = time.monotonic()
        if now < self._next:
            return
        state = self._tracker.state(now)
        pause = (time.monotonic() - now) / MAX_CPU_SHARE
        self._next = now + min(max(REFRESH_SECONDS, pause), MAX_REFRESH_SECONDS)
        if not state.ranks:
            # No rank has reported: the command is not a DDP job, or not yet.
            return
        self.pane.show(lambda columns: self._lines(state, columns))

    def _lines(self, state: LiveState, columns: int) -> list[str]:
        return self._panel_lines(state, self._console, columns)


@contextmanager
def live_view(run: RunReader, name: str, requested: bool | None, quiet: bool) -> Iterator[LiveView | None]:
    """The live view, removed at the end; None if it is disabled or the terminal does not support it."""
    pane = _open_pane() if live_view_enabled(requested, quiet) else None
    if pane is None:
        yield None
        return
    with pane:
        yield LiveView(run, name, pane)


def _open_pane() -> LivePane | None:
    from ddpcheck.reports.terminal.live import HEIGHT

    try:
        terminal = Terminal()
    except OSError:
        return None
    try:
        return LivePane(terminal, HEIGHT)
    except (OSError, NotImplementedError):
        terminal.close()
        return None

"""The live view under the job's own output: written by a thread, given up before it could be in the way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from ddpcheck.launcher.live.terminal import Terminal

_SAVE, _RESTORE = "\x1b7", "\x1b8"
# Off with whatever the job has set that would bend our text; restoring the cursor brings all of it back. The first
# of these moves the cursor.
_PLAIN = "\x1b[?6l\x1b(B\x0f\x1b[m"
_WHOLE_SCREEN = "\x1b[r"
_ERASE_REST = "\x1b[J"
_ERASE_LINES_BELOW = f"\x1b[m\x1b[B\r{_ERASE_REST}"
_ERASE_LINE = "\x1b[K"
# In a terminal that has become narrower without our knowing, a line that wraps would make the screen scroll.
_CUT_LINES, _WRAP_LINES = "\x1b[?7l", "\x1b[?7h"
# One row down, scrolling where that is the last one; unlike a newline it stays in its column.
_DOWN = "\x1bD"


def reserve(rows: int, lines: Sequence[str]) -> bytes:
    """Take the last rows of a terminal of `rows` rows and write `lines` there.

    The line the cursor is on moves up if it has to. What stood below it is erased: nothing, or our own lines at
    the place where a terminal of another size had them.
    """
    count = len(lines)
    make_room = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_DOWN * count}\x1b[{count}A"
    region = f"{_SAVE}{_ERASE_LINES_BELOW}{_PLAIN}\x1b[1;{rows - count}r"
    return f"{make_room}{region}{_written(rows, lines)}{_RESTORE}".encode()


def rewrite(rows: int, lines: Sequence[str]) -> bytes:
    """Write `lines` anew."""
    return f"{_SAVE}{_PLAIN}{_written(rows, lines)}{_RESTORE}".encode()


def give_back(rows: int, count: int) -> bytes:
    """Erase our rows and let the whole screen scroll again."""
    return f"{_SAVE}{_PLAIN}{_WHOLE_SCREEN}\x1b[{rows - count + 1};1H{_ERASE_REST}{_RESTORE}".encode()


def give_back_anywhere() -> bytes:
    """The same in a terminal whose size has changed since: our lines are somewhere below the cursor's."""
    below = f"{_DOWN}\x1b[A{_SAVE}{_ERASE_LINES_BELOW}{_RESTORE}"
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{below}".encode()


def let_go() -> bytes:
    """Let the whole screen scroll again and erase nothing: a program has taken the screen for itself."""
    return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}".encode()


def _written(rows: int, lines: Sequence[str]) -> str:
    first = rows - len(lines) + 1
    drawn = "".join(f"\x1b[{first + place};1H{line}\x1b[m{_ERASE_LINE}" for place, line in enumerate(lines))
    return f"{_CUT_LINES}{drawn}{_WRAP_LINES}"


# It ends when told so; at the end of its standard input ddpcheck has gone without a word.
_WAIT = """
import os, sys
if not os.read(0, 1):
    rows = os.get_terminal_size(1).lines
    first = max(1, rows - int(sys.argv[1]) + 1)
    os.write(1, f"\\x1b7\\x1b[?6l\\x1b[r\\x1b[{first};1H\\x1b[J\\x1b8".encode())
"""


class TerminalGuard:
    """One small process, in a session of its own so that what kills the job's group does not kill it."""

    def __init__(self, terminal: int, rows: int) -> None:
        read_end, self._lifeline = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                # No site, no environment: nothing of the user's, and nothing of ddpcheck's, runs in it.
                [sys.executable, "-I", "-S", "-c", _WAIT, str(rows)],
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
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
            os.close(null)

    def dismiss(self) -> None:
        """All is given back; there is nothing left to guard."""
        with contextlib.suppress(OSError):
            os.write(self._lifeline, b".")
        os.close(self._lifeline)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


# Smaller terminals belong to the job alone.
LEAST_ROWS = 12
LEAST_COLUMNS = 40
_PATIENCE_SECONDS = 1.0
# For so long a terminal must keep its size before rows are taken anew.
SETTLE_SECONDS = 1.0

# Lines for a terminal of so many columns, always the same number of them.
Draw = Callable[[int], Sequence[str]]


class LivePane:
    """Between `with` and its end the last rows of the terminal show what was last handed to `show`.

    Nothing here is ever waited for by the job, nor by the launcher while the job runs: where the terminal takes no
    more, a refresh is left out.
    """

    def __init__(self, terminal: Terminal, height: int) -> None:
        self._terminal = terminal
        self._height = height
        # Without it a killed ddpcheck would leave the region set. It has to be there before the job's first process:
        # what is started later counts as the job's.
        self._guard = TerminalGuard(terminal.descriptor, height)
        self._draw: Draw | None = None
        # The size of the terminal whose rows are ours; None: none are.
        self._held: os.terminal_size | None = None
        self._seen: os.terminal_size | None = None
        self._quiet_until = 0.0
        # A program has taken the screen, and lines of ours may come to light again when it leaves.
        self._gone = False
        self._stale = False
        self._away = False
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
        self._thread.join(_PATIENCE_SECONDS)
        self.put_away()
        # Of a terminal that takes nothing any more, the guard takes care once we are gone.
        if self._held is None:
            self._guard.dismiss()
        if not self._thread.is_alive():
            self._terminal.close()

    def show(self, draw: Draw) -> None:
        """Show this from now on."""
        self._draw = draw
        self._due.set()

    def resized(self) -> None:
        """The terminal has another size, and our rows may be anywhere: do not wait for the next refresh."""
        self._due.set()

    def look_out(self) -> None:
        """Give way for good where a program has taken the screen for itself, and clean up when it has left."""
        if (self._gone and not self._stale) or not self._terminal.in_foreground():
            return
        if self._terminal.is_taken() != self._gone:
            self._gone = True
            self._due.set()

    def put_away(self) -> None:
        """Leave the terminal as it would be without us, before ddpcheck stops or ends."""
        self._away = True
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            try:
                self._leave(_PATIENCE_SECONDS)
                self._clean_up(_PATIENCE_SECONDS)
            finally:
                self._lock.release()

    def bring_back(self) -> None:
        """ddpcheck goes on after a stop."""
        self._away = False
        self._due.set()

    def _run(self) -> None:
        # A signal would cut a write short; they are the main thread's business.
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
                    # A view that cannot be drawn must not end in a traceback amidst the job's output.
                    self._away = True
                    self._leave()

    def _refresh(self) -> None:
        if self._away or self._draw is None:
            return
        if not self._terminal.in_foreground():
            return
        taken = self._terminal.is_taken()
        if self._gone or taken:
            self._gone = True
            self._leave()
            if not taken:
                self._clean_up()
            return
        size = self._terminal.size()
        if size != self._seen:
            # Terminals move things about while their window is drawn larger or smaller: stay out of it meanwhile.
            self._quiet_until = time.monotonic() + SETTLE_SECONDS if self._seen is not None else 0.0
            self._seen = size
        if size != self._held:
            self._leave()
        small = size.lines < LEAST_ROWS or size.columns < LEAST_COLUMNS
        if small or time.monotonic() < self._quiet_until:
            return
        lines = self._draw(size.columns)
        data = reserve(size.lines, lines) if self._held is None else rewrite(size.lines, lines)
        if self._terminal.write(data):
            self._held = size

    def _leave(self, patience: float = 0.0) -> None:
        if self._held is None:
            return
        if self._gone:
            # Rows are the program's now, whatever is in them.
            data, self._stale = let_go(), True
        elif self._terminal.size() == self._held:
            data = give_back(self._held.lines, self._height)
        else:
            data = give_back_anywhere()
        if self._terminal.write(data, patience):
            self._held = None

    def _clean_up(self, patience: float = 0.0) -> None:
        if self._stale and self._terminal.write(give_back_anywhere(), patience):
            self._stale = False

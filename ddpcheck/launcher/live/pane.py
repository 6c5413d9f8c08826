"""The live view under the job's own output: written by a thread, given up before it could be in the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from ddpcheck.launcher.live.terminal import Terminal
from ddpcheck.launcher.reserved_rows import give_back, give_back_anywhere, let_go, reserve, rewrite
from ddpcheck.launcher.terminal_guard import TerminalGuard

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

"""The live view: computes the state of the run and draws it into the pane."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ddpcheck.analysis.live.tracker import LiveState, LiveTracker
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.launcher.live.pane import LivePane, Terminal, live_view_enabled

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

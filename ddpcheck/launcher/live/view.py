"""Brings the live view together: what is known of the run, how it is drawn, and the rows it is drawn on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ddpcheck.analysis.live.state import LiveState
from ddpcheck.analysis.live.tracker import LiveTracker
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.launcher.live.pane import LivePane
from ddpcheck.launcher.live.terminal import Terminal, wanted

REFRESH_SECONDS = 0.5
# Of one processor, for working out the state: with a thousand ranks it is worked out less often.
MOST_SHARE = 0.01
SELDOM_SECONDS = 10.0


class LiveView:
    """Called at every turn of the supervisor; draws at some of them."""

    def __init__(self, run: RunReader, name: str, pane: LivePane) -> None:
        from rich.console import Console

        from ddpcheck.reports.terminal.live import panel_lines

        self.pane = pane
        self._tracker = LiveTracker(run, name, time.monotonic())
        self._console = Console(stderr=True)
        self._panel_lines = panel_lines
        self._next = 0.0

    def tick(self) -> None:
        self.pane.look_out()
        now = time.monotonic()
        if now < self._next:
            return
        state = self._tracker.state(now)
        pause = (time.monotonic() - now) / MOST_SHARE
        self._next = now + min(max(REFRESH_SECONDS, pause), SELDOM_SECONDS)
        if not state.ranks:
            # The terminal stays as it is for a command that is no DDP job, or none yet.
            return
        self.pane.show(lambda columns: self._lines(state, columns))

    def _lines(self, state: LiveState, columns: int) -> list[str]:
        return self._panel_lines(state, self._console, columns)


@contextmanager
def live_show(run: RunReader, name: str, asked: bool | None, quiet: bool) -> Iterator[LiveView | None]:
    """The view, taken away again at the end; None where there shall be none, or nothing to show it on."""
    pane = _pane() if wanted(asked, quiet) else None
    if pane is None:
        yield None
        return
    with pane:
        yield LiveView(run, name, pane)


def _pane() -> LivePane | None:
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

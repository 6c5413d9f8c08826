"""Counts how many lines of a job stay intact above the live view, in a real terminal (tmux).

    python benchmarks/live_terminal.py [TIMES]

A job prints 100 lines a second for eight seconds while the window changes its size four times; the view is refreshed
as in earnest. Then everything on the screen and in its history is compared with what was printed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = 800
SIZES = ((80, 40), (80, 16), (120, 30), (50, 24))

DRIVER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from ddpcheck.launcher.live_view import LivePane
from ddpcheck.records.node_log import NodeLog
from ddpcheck.launcher.process.supervise import supervise
from ddpcheck.launcher.live_view import Terminal
turns = 0
def tick():
    global turns
    turns += 1
    pane.check_raw_mode()
    if turns % 5 == 0:
        pane.show(lambda columns: ["PANEL" * 12 for row in range(4)])
with LivePane(Terminal(), 4) as pane:
    supervise(sys.argv[2:], dict(os.environ), on_tick=tick, node_log=NodeLog(sys.argv[1]), screen=pane)
"""
JOB = f"""
import time
for number in range({LINES}):
    print("line", number, flush=True)
    time.sleep(0.01)
"""


class Tmux:
    """One server of our own, with one window."""

    def __init__(self, name: str, command: str) -> None:
        self._name = name
        start = ("start-server", ";", "set", "-g", "history-limit", "50000", ";")
        self.ask(*start, "new-session", "-d", "-s", "w", "-x", "80", "-y", "24", command)

    def ask(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._name, "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def everything(self) -> list[str]:
        return self.ask("capture-pane", "-p", "-J", "-S", "-", "-t", "w").rstrip("\n").split("\n")


def trial(number: int, folder: Path) -> tuple[int, int]:
    """Lines that are not there as they were printed, and rows of the view that stayed behind."""
    command = shlex.join([sys.executable, "-c", DRIVER, str(folder), sys.executable, "-c", JOB])
    done = folder / "done"
    terminal = Tmux(f"ddpcheck-live-{number}", f"{command}; touch {done}; sleep 30")
    for width, height in SIZES:
        # Not always at the same point between two refreshes.
        time.sleep(1.8 + 0.07 * number)
        assert all("PANEL" in row for row in terminal.everything()[-4:]), "the view is not there"
        terminal.ask("resize-window", "-t", "w", "-x", str(width), "-y", str(height))
    while not done.exists():
        time.sleep(0.1)
    rows = terminal.everything()
    terminal.ask("kill-server")
    shown = set(rows)
    return sum(f"line {n}" not in shown for n in range(LINES)), sum("PANEL" in row for row in rows)


def main(times: int) -> None:
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            lost, left = trial(number, Path(folder))
        print(f"{lost} of {LINES} lines not as printed, {left} rows of the view left behind")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)

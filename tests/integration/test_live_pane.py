"""The live view below a job's output, on a real pseudo-terminal: the job's lines stay intact above the view.

The view is refreshed thirty times as often as in real use, to provoke interleaved output.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.pty_screen import PtyScreen

HEIGHT = 4

DRIVER = """
import sys
sys.path.insert(0, {root!r})
from ddpcheck.launcher import live_view as live_pane
from ddpcheck.records.node_log import NodeLog
from ddpcheck.launcher.process.command import exit_like
from ddpcheck.launcher.process.supervise import supervise
from ddpcheck.launcher.live_view import Terminal
import os
folder, *command = sys.argv[1:]
open(folder + "/driver", "w").write(str(os.getpid()))
turns = 0
def tick():
    global turns
    turns += 1
    number = turns
    pane.check_raw_mode()
    dots = lambda columns: "." * (columns - 20)
    pane.show(lambda columns: [f"\\x1b[32mPANEL{{row}} {{number}}{{dots(columns)}}\\x1b[m" for row in range({height})])
live_pane.RESIZE_PAUSE_SECONDS = 0.1
with live_pane.LivePane(Terminal(), {height}) as pane:
    log = NodeLog(folder, host="here")
    status = supervise(command, dict(os.environ), on_tick=tick, tick_seconds=0.016, node_log=log, screen=pane)
exit_like(status)
"""

Start = Callable[..., PtyScreen]


def driven(folder: Path, command: Sequence[str]) -> list[str]:
    driver = DRIVER.format(root=str(ROOT), height=HEIGHT)
    return [sys.executable, "-c", driver, str(folder), *command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[PtyScreen] = []

    def run(code: str, rows: int = 24, columns: int = 80, shell: str = "", **env: str) -> PtyScreen:
        command = driven(tmp_path, [sys.executable, "-u", "-c", code])
        if shell:
            command = ["bash", "-c", shell, "bash", *command]
        started.append(PtyScreen(command, cwd=tmp_path, rows=rows, columns=columns, env=env))
        return started[-1]

    yield run
    for screen in started:
        screen.close()


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Without reading from the terminal."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def only_panel_is_last(screen: PtyScreen) -> bool:
    """Whether the last rows, and no others, show the view in this width."""
    rows, dots = screen.lines(), f"[.]{{{screen.screen.columns - 20}}}"
    own = [re.fullmatch(rf"PANEL{number} \d+{dots}", row) for number, row in enumerate(rows[-HEIGHT:])]
    return all(own) and not any("PANEL" in row for row in rows[:-HEIGHT])


def panel_is_last(screen: PtyScreen) -> bool:
    """Whether the last rows show the view in this width; the rows above are not checked."""
    return all(
        re.fullmatch(rf"PANEL{number} \d+[.]{{{screen.screen.columns - 20}}}", row)
        for number, row in enumerate(screen.lines()[-HEIGHT:])
    )


def jobs_lines(screen: PtyScreen) -> list[str]:
    """Everything that was on the screen, after the view is gone, without empty rows at the end."""
    assert not any("PANEL" in row or "....." in row for row in screen.everything()), "\n".join(
        screen.everything()
    )
    assert screen.region is None
    rows = screen.everything()
    while rows and not rows[-1]:
        rows.pop()
    return rows


def test_no_line_of_fast_output_is_lost(start: Start) -> None:
    screen = start("for number in range(4000): print('line', number)\nimport time; time.sleep(0.2)")
    seen = 0
    while screen.read(0.5) and "line 3999" not in screen.lines():
        seen += only_panel_is_last(screen)
    assert seen
    assert screen.wait() == 0
    assert jobs_lines(screen) == [f"line {number}" for number in range(4000)]


def test_lines_that_wrap(start: Start) -> None:
    code = """
import sys, time
for number in range(60):
    sys.stdout.write(f"{number:03d}" + "x" * 197 + "\\n")
    time.sleep(0.01)
"""
    screen = start(code)
    screen.until(lambda: only_panel_is_last(screen))
    screen.wait()
    expected = [row for number in range(60) for row in (f"{number:03d}" + "x" * 77, "x" * 80, "x" * 40)]
    assert jobs_lines(screen) == expected


def test_a_progress_bar_with_carriage_returns(start: Start) -> None:
    code = """
import time
from tqdm import tqdm
for _ in tqdm(range(100), ncols=60, mininterval=0):
    time.sleep(0.01)
print("done")
"""
    screen = start(code)
    screen.until(lambda: only_panel_is_last(screen) and any("it/s" in row for row in screen.lines()))
    screen.wait()
    rows = jobs_lines(screen)
    assert len(rows) == 2
    assert re.fullmatch(r"100%\|.*\| 100/100 \[.*it/s\]", rows[0])
    assert rows[1] == "done"


def test_words_and_colours_within_a_line(start: Start) -> None:
    code = r"""
import os, time
for number in range(12):
    for word in ("\033[31mone", " two", " drei\N{LATIN SMALL LETTER SHARP S}", "\033[0m plain\n"):
        os.write(1, word.encode())
        time.sleep(0.02)
"""
    screen = start(code, rows=20)
    screen.wait()
    assert jobs_lines(screen) == ["one two dreiß plain"] * 12
    row = screen.screen.buffer[11]
    assert [row[column].fg for column in (0, 4, 12, 14)] == ["red", "red", "red", "default"]


def test_a_job_that_clears_the_screen(start: Start) -> None:
    code = r"""
import sys, time
print("before")
time.sleep(0.2)
sys.stdout.write("\033[H\033[2J")
for number in range(40):
    print("after", number)
    time.sleep(0.01)
time.sleep(0.2)
"""
    screen = start(code)
    screen.until(lambda: "after 39" in screen.lines() and only_panel_is_last(screen))
    screen.wait()
    assert [row for row in jobs_lines(screen) if row != "before"] == [f"after {n}" for n in range(40)]


def test_resizing_during_a_run(start: Start, tmp_path: Path) -> None:
    # The job prints nothing while the size changes: a terminal moves its rows before it notifies programs. A view
    # drawn at that moment may leave a row behind, as docs/live.md says; the job's own rows are complete and in order.
    code = """
import os, time
for part in range(5):
    while not os.path.exists(f"go-{part}"):
        time.sleep(0.01)
    for number in range(30 * part, 30 * part + 30):
        print("line", number)
        time.sleep(0.005)
"""
    screen = start(code)
    for part, size in enumerate(((24, 80), (24, 120), (24, 100), (24, 132), (24, 50))):
        screen.resize(*size)
        screen.until(lambda: panel_is_last(screen))
        (tmp_path / f"go-{part}").touch()
        screen.until(lambda last=30 * part + 29: f"line {last}" in screen.lines())
        # The end of that line may still be in flight. After a resize it would move the cursor into the view.
        screen.pause(0.1)
    screen.wait()
    rows = [row for row in screen.everything() if row and not row.startswith("PANEL")]
    assert rows == [f"line {number}" for number in range(150)]


def test_small_terminals_show_no_view_until_they_grow(start: Start) -> None:
    screen = start("import time\nprint('here')\ntime.sleep(1)", rows=11)
    screen.until(lambda: "here" in screen.lines())
    screen.pause(0.2)
    assert screen.region is None
    assert b"PANEL" not in screen.raw
    screen.resize(24, 80)
    screen.until(lambda: only_panel_is_last(screen))
    screen.resize(11, 80)
    screen.until(lambda: screen.region is None and not any("PANEL" in row for row in screen.lines()))
    screen.wait()
    assert not any("PANEL" in row for row in screen.lines())


def test_full_screen_programs_get_the_whole_screen(start: Start) -> None:
    code = r"""
import curses, time
print("before")
time.sleep(0.3)
def main(window):
    window.clear()
    for row in range(curses.LINES - 1):
        window.addstr(row, 0, f"row {row}")
    window.addstr(curses.LINES - 1, 0, "the last row")
    window.refresh()
    time.sleep(0.5)
    window.addstr(1, 0, "still here")
    window.refresh()
    time.sleep(0.2)
curses.wrapper(main)
for number in range(30):
    print("after", number)
    time.sleep(0.01)
"""
    screen = start(code)
    screen.until(lambda: only_panel_is_last(screen))
    screen.until(lambda: "still here" in screen.lines())
    assert screen.lines()[-1] == "the last row"
    assert "row 20" in screen.lines()
    assert screen.region in (None, (0, 23))
    screen.wait()
    assert b"PANEL" not in screen.raw.split(b"still here")[1]
    assert not any("." in row for row in screen.everything()[-28:])
    assert [row for row in screen.lines() if row][-3:] == ["after 27", "after 28", "after 29"]


def test_ctrl_c(start: Start) -> None:
    screen = start("import time\nprint('running')\ntime.sleep(60)")
    screen.until(lambda: only_panel_is_last(screen) and "running" in screen.lines())
    # The end of the line may still be in flight: the kernel's echo could overtake it.
    screen.pause(0.1)
    screen.type(b"\x03")
    assert screen.wait() == -signal.SIGINT
    rows = jobs_lines(screen)
    assert rows[0] == "running"
    assert rows[1].startswith("^CTraceback")


def test_the_shell_gets_the_whole_screen_while_the_job_is_stopped(start: Start) -> None:
    code = "import time\nfor number in range(100):\n    print('line', number)\n    time.sleep(0.02)"
    screen = start(code, shell='set -m; "$@"; echo STOPPED; sleep 0.4; fg >/dev/null; echo DONE')
    screen.until(lambda: only_panel_is_last(screen) and "line 10" in screen.lines())
    screen.type(b"\x1a")
    screen.until(lambda: "STOPPED" in screen.lines())
    screen.pause(0.1)
    assert screen.region is None
    assert not any("PANEL" in row for row in screen.lines())
    screen.until(lambda: only_panel_is_last(screen))
    assert screen.wait() == 0
    rows = jobs_lines(screen)
    assert [row for row in rows if row.startswith("line")] == [f"line {n}" for n in range(100)]
    assert rows[-1] == "DONE"


@pytest.mark.parametrize("whole_group", [False, True])
def test_the_terminal_is_restored_after_ddpcheck_is_killed(
    start: Start, tmp_path: Path, whole_group: bool
) -> None:
    code = "import time\nfor number in range(60):\n    print('line', number)\n    time.sleep(0.02)"
    screen = start(code, shell='set -m; "$@"; sleep 20')
    screen.until(lambda: only_panel_is_last(screen) and "line 20" in screen.lines())
    driver = int((tmp_path / "driver").read_text())
    (os.killpg if whole_group else os.kill)(driver, signal.SIGKILL)
    screen.until(lambda: screen.region is None)
    screen.until(lambda: not any("PANEL" in row for row in screen.lines()))
    if not whole_group:
        screen.until(lambda: "line 59" in screen.lines())
        # The shell's own message about the kill may be anywhere, even inside a line.
        text = re.sub(r'bash: line \d+:\s+\d+ Killed\s+"\$@"', "", "".join(jobs_lines(screen)))
        assert text == "".join(f"line {n}" for n in range(60))


def test_a_paused_terminal_does_not_block_the_job(start: Start, tmp_path: Path) -> None:
    code = """
import os, time
os.write(1, b"here\\n")
time.sleep(0.6)
open("went-on", "w").close()
time.sleep(0.2)
"""
    screen = start(code)
    screen.until(lambda: only_panel_is_last(screen) and "here" in screen.lines())
    screen.type(b"\x13")  # Ctrl-S
    wait_until((tmp_path / "went-on").exists)
    screen.type(b"\x11")
    screen.wait()
    assert jobs_lines(screen) == ["here"]


def test_a_terminal_has_one_view_at_most(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from ddpcheck.launcher.live_view import Terminal
first = Terminal()
try:
    Terminal()
except OSError:
    print("taken")
first.close()
Terminal().close()
print("free")
"""
    screen = PtyScreen([sys.executable, "-c", code], cwd=tmp_path)
    assert screen.wait() == 0
    assert screen.lines()[:2] == ["taken", "free"]
    screen.close()


def test_a_view_that_fails_to_draw_is_removed(tmp_path: Path) -> None:
    driver = driven(tmp_path, [sys.executable, "-c", "import time\nprint('here')\ntime.sleep(0.8)"])
    driver[2] = driver[2].replace("for row in range", "for row in [1 / (number < 20)] and range")
    screen = PtyScreen(driver, cwd=tmp_path)
    screen.until(lambda: only_panel_is_last(screen))
    screen.until(lambda: screen.region is None)
    assert screen.wait() == 0
    assert jobs_lines(screen) == ["here"]
    screen.close()

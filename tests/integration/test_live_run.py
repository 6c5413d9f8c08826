"""The live view of `ddpcheck run`: shown on a terminal only, agrees with the records, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpcheck.records.registry import to_line
from tests.helpers.commands import BIN
from tests.helpers.paths import ROOT
from tests.helpers.pty_screen import PtyScreen
from tests.helpers.run_builder import RunBuilder

STORED = ROOT / "tests" / "stored_runs"
# A job without torch: it writes the records of two ranks, in three parts.
JOB = """
import json, os, time
folder = json.loads(os.environ["DDPCHECK_CONFIG"])["run_dir"]
def put(part):
    for rank in range(2):
        with open(f"{folder}/rank-{rank:05d}.jsonl", "ab") as file:
            file.write(open(f"part-{part}-{rank}", "rb").read())
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)
print("isatty", os.isatty(0), os.isatty(1), os.isatty(2), flush=True)
put(0)
wait_for("part")
put(1)
for number in range(40):
    print("line", number, flush=True)
wait_for("end")
put(2)
print("the end", flush=True)
"""

Start = Callable[..., PtyScreen]


@pytest.fixture(autouse=True)
def parts(tmp_path: Path) -> None:
    """The records: three steps, a step at which the ranks diverge and one that uses the result, the end."""
    builder = RunBuilder(tmp_path, 2)
    outliers = {1: ["body.bias"]}
    for part, more in enumerate(
        (
            lambda: builder.wrap().optimizer().train(3),
            lambda: builder.step(3, outliers=outliers).step(4, outliers=outliers),
            lambda: builder.end(),
        )
    ):
        more()
        for rank, records in builder.records.items():
            (tmp_path / f"part-{part}-{rank}").write_bytes(b"".join(map(to_line, records)))
            records.clear()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[PtyScreen] = []

    def run(*options: str, **env: str) -> PtyScreen:
        command = [str(BIN / "ddpcheck"), "run", "--out", "run", *options, "--", sys.executable, "-c", JOB]
        started.append(PtyScreen(command, cwd=tmp_path, rows=30, env=env))
        return started[-1]

    yield run
    for screen in started:
        screen.close()


def test_the_view_follows_the_job_on_a_terminal(start: Start, tmp_path: Path) -> None:
    screen = start()
    screen.until(lambda: any("agree" in row and "3 steps" in row for row in screen.lines()[-4:]))
    (tmp_path / "part").touch()
    screen.until(lambda: any("DDP201" in row for row in screen.lines()[-4:]))
    assert screen.lines()[-4].startswith("── ddpcheck ")
    assert "2 ranks" in screen.lines()[-4]
    assert all(words in screen.lines()[-3] for words in ("5 steps", "step 3"))  # now, and where they diverged
    # The same state by `ddpcheck watch`, without a terminal.
    seen = subprocess.run(
        [BIN / "ddpcheck", "watch", tmp_path / "run", "--once"], capture_output=True, text=True, check=True
    )
    assert "2 ranks" in seen.stdout
    assert "DDP201" in seen.stdout
    (tmp_path / "end").touch()
    assert screen.wait() == 10
    rows = screen.everything()
    assert rows[0] == "isatty True True True"
    assert [row for row in rows if row.startswith("line")] == [f"line {number}" for number in range(40)]
    assert screen.region is None
    assert not any(row.startswith("── ddpcheck") for row in rows)
    assert any("DDP201" in row for row in rows)


def test_no_live_shows_no_view(start: Start, tmp_path: Path) -> None:
    (tmp_path / "part").touch()
    screen = start("--no-live")
    screen.until(lambda: "line 39" in screen.lines())
    screen.pause(0.8)
    (tmp_path / "end").touch()
    assert screen.wait() == 10
    assert b"\x1b7" not in screen.raw
    assert b"DDP201" not in screen.raw.split(b"the end")[0]


def test_there_is_no_view_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "part").touch()
    (tmp_path / "end").touch()
    command = [BIN / "ddpcheck", "run", "--live", "--out", "run", "--", sys.executable, "-c", JOB]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 10
    lines = b"".join(b"line %d\n" % number for number in range(40))
    assert done.stdout == b"isatty False False False\n" + lines + b"the end\n"
    assert b"\x1b" not in done.stderr
    listed = subprocess.run(
        [BIN / "ddpcheck", "list", tmp_path, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    [run] = json.loads(listed.stdout)["runs"]
    assert (run["folder"], run["state"], run["world_size"], run["steps"]) == ("run", "findings", 2, 5)


def test_watch_on_a_terminal_ends_with_the_verdict(tmp_path: Path) -> None:
    stored = STORED / "1-bypass"
    screen = PtyScreen([str(BIN / "ddpcheck"), "watch", str(stored)], cwd=tmp_path, rows=40)
    assert screen.wait() == 0
    assert any("step 0" in row for row in screen.lines())  # where the ranks diverged
    assert b"\x1b[?1049h" in screen.raw
    assert b"\x1b[?1049l" in screen.raw
    screen.close()

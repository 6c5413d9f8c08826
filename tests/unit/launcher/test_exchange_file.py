"""The shared-memory file of a run, and what a killed launcher leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.launcher import exchange_file as module
from ddpcheck.launcher.exchange_file import exchange_file

# Another launcher: holds a file until it is killed.
LAUNCHER = """
import sys, time
from ddpcheck.launcher import exchange_file as module
module.FOLDERS = (sys.argv[1],)
with module.exchange_file() as path:
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FOLDERS", (str(tmp_path),))
    return tmp_path


def test_the_file_is_removed_with_the_run(folder: Path) -> None:
    with exchange_file() as path:
        assert path is not None
        assert list(folder.iterdir()) == [path]
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_launcher_is_removed_by_the_next_run(folder: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with exchange_file() as path:
            # Its launcher exists.
            assert path is not None
            assert sorted(folder.iterdir()) == sorted([left, path])
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert list(folder.iterdir()) == [left]
    with exchange_file() as path:
        assert list(folder.iterdir()) == [path]


def test_files_that_are_not_ours_stay(folder: Path) -> None:
    others = [folder / "data", folder / f"ddpcheck-run-{os.getuid() + 1}-abc", folder / "ddpcheck-0-abc"]
    for path in others:
        path.write_bytes(b"x")
    with exchange_file():
        pass
    assert sorted(folder.iterdir()) == sorted(others)


def test_a_file_that_may_not_be_locked_yet_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = folder / f".ddpcheck-new-{os.getuid()}-abc"
    new.write_bytes(b"x")
    with exchange_file():
        assert new.exists()
    assert new.exists()
    # After a minute, its launcher was killed before it could lock it.
    monkeypatch.setattr(module, "_LOCKED_AFTER_SECONDS", -1.0)
    with exchange_file() as path:
        assert list(folder.iterdir()) == [path]

"""The shared-memory file of a run, and what a killed launcher leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.agent.shm_exchange import join_exchange
from ddpcheck.config import Config
from ddpcheck.launcher import exchange_file as module
from ddpcheck.launcher.exchange_file import exchange_file, exchanges_in_use
from ddpcheck.machine_identity import boot_id

NO_RUN = Path("/nonexistent")
# Another launcher: holds a file until it is killed.
LAUNCHER = """
import sys, time
from pathlib import Path
from ddpcheck.launcher import exchange_file as module
module.FOLDERS = (sys.argv[1],)
with module.exchange_file(Path("/nonexistent")) as path:
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FOLDERS", (str(tmp_path),))
    return tmp_path


def test_the_file_is_removed_with_the_run(folder: Path) -> None:
    with exchange_file(NO_RUN) as path:
        assert path is not None
        assert list(folder.iterdir()) == [path]
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_launcher_is_removed_by_the_next_run(folder: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with exchange_file(NO_RUN) as path:
            # Its launcher exists.
            assert path is not None
            assert sorted(folder.iterdir()) == sorted([left, path])
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert list(folder.iterdir()) == [left]
    with exchange_file(NO_RUN) as path:
        assert list(folder.iterdir()) == [path]


def test_files_that_are_not_ours_stay(folder: Path) -> None:
    others = [folder / "data", folder / f"ddpcheck-run-{os.getuid() + 1}-abc", folder / "ddpcheck-0-abc"]
    for path in others:
        path.write_bytes(b"x")
    with exchange_file(NO_RUN):
        pass
    assert sorted(folder.iterdir()) == sorted(others)


def test_a_file_that_may_not_be_locked_yet_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = folder / f".ddpcheck-new-{os.getuid()}-abc"
    new.write_bytes(b"x")
    assert time.time() - new.stat().st_ctime < 60.0
    with exchange_file(NO_RUN):
        assert new.exists()
    assert new.exists()
    # After a minute, its launcher was killed before it could lock it.
    monkeypatch.setattr(module, "_LOCKED_AFTER_SECONDS", -1.0)
    with exchange_file(NO_RUN) as path:
        assert list(folder.iterdir()) == [path]


def test_the_run_folder_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLDERS", ("/proc/nowhere",))
    with exchange_file(tmp_path) as path:
        assert path is not None
        assert path.parent == tmp_path
    monkeypatch.setattr(module, "is_on_this_machine", lambda folder: False)
    with exchange_file(tmp_path) as path:
        assert path is None


def test_ranks_that_cannot_open_it_make_one_in_the_run_folder(tmp_path: Path) -> None:
    """A container with a /dev/shm of its own. Ranks on another machine, or with a network file system, do not."""
    own, run = tmp_path / "own", tmp_path / "run"
    own.mkdir()
    run.mkdir()
    config = Config(run_dir=str(run), exchange_file=str(own / "abc"), launcher_boot=boot_id())
    assert exchanges_in_use(config) == [own / "abc"]
    assert [join_exchange(config, rank).path for rank in (0, 1)] == [run / "exchange-abc"] * 2
    assert list(run.iterdir()) == [run / "exchange-abc"]
    assert exchanges_in_use(config) == [own / "abc", run / "exchange-abc"]
    elsewhere = replace(config, exchange_file=str(own / "def"), launcher_boot="another")
    with pytest.raises(FileNotFoundError):
        join_exchange(elsewhere, 0)
    assert exchanges_in_use(elsewhere) == [own / "def"]

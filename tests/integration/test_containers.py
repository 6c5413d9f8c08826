"""Ranks that ddpcheck's variables or folders do not reach: the report says which, from what the launcher saw."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import BIN
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, assert_healthy, read_run

pytestmark = pytest.mark.slow

DDPCHECK = BIN / "ddpcheck"
JOB = (sys.executable, JOBS / "by_multiprocessing.py", "fork")


def not_checked(watched: WatchedRun) -> str:
    """The reason for DDP601."""
    assert watched.status == 10, str(watched)
    assert watched.report["verdict"] == "incomplete"
    [why] = watched.finding("DDP601")["evidence"]["unwatched"]
    return str(why)


def test_an_environment_that_is_reset(ddpcheck: RunWatched) -> None:
    watched = ddpcheck("env", "--unset=DDPCHECK_CONFIG", "--unset=PYTHONPATH", *JOB)
    assert not_checked(watched) == "environment"


@pytest.mark.needs("lab")
def test_a_run_folder_that_does_not_exist_for_the_ranks(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """A mount namespace of its own, as in a container. The rank says it once, and the job goes on."""
    parent = tmp_path / "runs"
    parent.mkdir()
    hide = f'mount -t tmpfs none {parent} && exec "$@"'
    watched = ddpcheck("unshare", "--mount", "sh", "-c", hide, "sh", *JOB, out=parent / "run")
    assert not_checked(watched) == "no_folder"
    assert f"-v {parent / 'run'}:{parent / 'run'}" in watched.finding("DDP601")["fix"]
    lines = [line for line in watched.stderr.splitlines() if line.startswith("ddpcheck: this process cannot")]
    # One for each of the two ranks.
    assert len(lines) == 2, str(watched)


# Namespaces and mounts of their own, as in a container: host name, process ids, /dev/shm, and a root that cannot be
# written. $0 is the folder that is mounted.
CONTAINER = """
hostname inside
mount -t proc proc /proc
mount -t tmpfs -o size=64k none /dev/shm
mount --bind "$0" "$0"
mount -o remount,bind,ro /
exec "$@"
"""
UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a user mounts into the container: a folder for runs and for temporary files."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


def contained(folder: Path, *command: object) -> tuple[object, ...]:
    return (*UNSHARE, "sh", "-c", CONTAINER, folder, *command)


@pytest.mark.needs("lab")
def test_a_job_in_a_container_that_hangs(ddpcheck: RunWatched, folder: Path) -> None:
    """Its ranks belong to the launcher outside, share memory with it in the run folder, and answer it."""
    job = (sys.executable, JOBS / "hangs.py", "left_the_group")
    watched = ddpcheck(
        *contained(folder, *job), out=folder / "run", options=("--hang-timeout", "3"), TMPDIR=str(folder)
    )
    assert watched.status == 10, str(watched)
    hang = watched.finding("DDP603")
    # Rank 0 waits, and the stack of rank 1 is that of its answer.
    assert (hang["step"], hang["ranks"]) == (4, [1])
    assert {row["host"] for row in watched.report["hosts"]} <= {os.uname().nodename}
    assert watched.files("exchange-*") == []
    assert "DDP605" not in watched.codes(), str(watched)


@pytest.mark.needs("lab")
def test_a_rank_in_a_container_that_is_killed(ddpcheck: RunWatched, folder: Path) -> None:
    watched = ddpcheck(*contained(folder, *JOB, "killed"), out=folder / "run", TMPDIR=str(folder))
    assert watched.finding("DDP602")["ranks"] == [1], str(watched)
    # The launcher saw it, although the process has another id outside.
    [killed] = [record for record in watched.node_records("rank_exit") if record["rank"] == 1]
    assert killed["signal"] == signal.SIGKILL
    assert killed["pid"] == watched.records(1)[0]["pid"]


@pytest.mark.needs("lab")
def test_ddpcheck_in_a_container_too(unwatched: Run, folder: Path) -> None:
    """It is process 1 there."""
    watch = (DDPCHECK, "run", "--out", folder / "run", "--")
    job = unwatched(*contained(folder, *watch, *JOB), TMPDIR=str(folder))
    assert_healthy(read_run(job, folder / "run"), world_size=2, steps=3)


@pytest.mark.needs("lab")
def test_a_job_that_runs_as_another_user(ddpcheck: RunWatched, folder: Path) -> None:
    watched = ddpcheck("setpriv", "--reuid=65534", "--clear-groups", *JOB, out=folder / "run")
    assert not_checked(watched) == "other_user"


@pytest.mark.needs("lab")
def test_another_user_with_a_folder_that_both_may_write_to(ddpcheck: RunWatched, folder: Path) -> None:
    """It cannot open the launcher's shared memory, so it makes its own in the run folder."""
    for path in (folder, folder / "run"):
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)
    # pytest makes its folders for one user.
    for path in folder.parents:
        if path.stat().st_mode & 0o077 == 0:
            path.chmod(0o755)
    watched = ddpcheck("setpriv", "--reuid=65534", "--clear-groups", *JOB, out=folder / "run")
    assert_healthy(watched, world_size=2, steps=3)

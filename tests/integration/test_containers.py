"""Ranks that ddpcheck's variables or folders do not reach: the report says which, from what the launcher saw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.paths import JOBS
from tests.helpers.watched_run import RunWatched, WatchedRun

pytestmark = pytest.mark.slow

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


@pytest.mark.needs("lab")
def test_another_host_name_and_read_only_root(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """A UTS namespace and a root that cannot be written, with the run folder mounted: as in a container."""
    from tests.helpers.watched_run import assert_healthy

    folder = tmp_path / "runs"
    folder.mkdir()
    inside = f'hostname inside && mount --bind {folder} {folder} && mount -o remount,bind,ro / && exec "$@"'
    # The job itself needs a folder for temporary files.
    command = ("unshare", "--mount", "--uts", "sh", "-c", inside, "sh", "env", f"TMPDIR={folder}", *JOB)
    watched = ddpcheck(*command, out=folder / "run")
    assert_healthy(watched, world_size=2, steps=3)

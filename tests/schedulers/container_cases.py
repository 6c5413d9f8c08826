"""podman, with this machine's file system as the root of the container, which cannot be written there."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, assert_healthy, read_run
from tests.schedulers.runs import DDPCHECK, STEPS

JOB = (sys.executable, JOBS / "by_multiprocessing.py", "fork")
ROOT = Path("/srv/ddpcheck-rootfs")
# What ddpcheck tells users to pass on.
VARIABLES = ("-e", "PYTHONPATH", "-e", "DDPCHECK_CONFIG")
Podman = Sequence[object]


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    """`podman run` with its storage in a folder of the tests."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    ROOT.mkdir(exist_ok=True)
    # These mounts end with the tests. A machine with both versions of cgroups then looks like one with the second.
    subprocess.run(["mount", "--bind", "/", ROOT], check=True)
    subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
    folder = tmp_path_factory.mktemp("podman")
    storage = ("--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs")
    # Without a tmpfs at /tmp, into which podman would copy all of the machine's.
    options = (
        "--rm",
        "--read-only",
        "--read-only-tmpfs=false",
        "--network=host",
        "--cgroups=disabled",
        "--hostname=inside",
    )
    command = ("podman", *storage, "--cgroup-manager=cgroupfs", "--events-backend=file", "run", *options)
    tried = subprocess.run(
        list(map(str, (*command, "--rootfs", ROOT, "true"))), capture_output=True, text=True, timeout=120
    )
    if tried.returncode:
        pytest.skip(f"podman cannot start a container here: {tried.stderr.strip()}")
    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is mounted into the container: a folder for runs and for temporary files."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


def mounted(podman: Podman, folder: Path, *options: object) -> Podman:
    return (*podman, *options, "-v", f"{folder}:{folder}", "-e", f"TMPDIR={folder}", "--rootfs", ROOT)


def test_healthy(ddpcheck: RunWatched, podman: Podman, folder: Path) -> None:
    """ddpcheck around podman, with -e and -v: healthy"""
    watched = ddpcheck(*mounted(podman, folder, *VARIABLES), *JOB, out=folder / "run")
    assert_healthy(watched, world_size=2, steps=STEPS)


def test_killed(ddpcheck: RunWatched, podman: Podman, folder: Path) -> None:
    """ddpcheck around podman, with -e and -v: a rank is killed"""
    watched = ddpcheck(*mounted(podman, folder, *VARIABLES), *JOB, "killed", out=folder / "run")
    assert watched.finding("DDP602")["ranks"] == [1], str(watched)
    [killed] = [record for record in watched.node_records("rank_exit") if record["rank"] == 1]
    assert killed["signal"] == signal.SIGKILL


def test_hanging(ddpcheck: RunWatched, podman: Podman, folder: Path) -> None:
    """ddpcheck around podman, with -e and -v: the job hangs"""
    job = (sys.executable, JOBS / "hangs.py", "left_the_group")
    command = (*mounted(podman, folder, *VARIABLES), *job)
    watched = ddpcheck(*command, out=folder / "run", options=("--hang-timeout", 5))
    assert watched.finding("DDP603")["ranks"] == [1], str(watched)


def test_without_variables(ddpcheck: RunWatched, podman: Podman, folder: Path) -> None:
    """ddpcheck around podman, without -e and -v: no rank is watched, and the report prints the options"""
    watched = ddpcheck(*podman, "-e", "TMPDIR=/dev/shm", "--rootfs", ROOT, *JOB, out=folder / "run")
    assert watched.status == 10, str(watched)
    found = watched.finding("DDP601")
    # The container's own process is seen too: its environment lacks the variables.
    assert "podman" in found["evidence"]["unwatched"].values()
    assert f"-v {folder / 'run'}:{folder / 'run'}" in found["fix"]


def test_inside(unwatched: Run, podman: Podman, folder: Path) -> None:
    """ddpcheck inside podman: healthy"""
    watch = (DDPCHECK, "run", "--out", folder / "run", "--")
    job = unwatched(*mounted(podman, folder), *watch, *JOB)
    assert_healthy(read_run(job, folder / "run"), world_size=2, steps=STEPS)

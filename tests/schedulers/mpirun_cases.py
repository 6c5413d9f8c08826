"""OpenMPI 4.1 on this machine."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.watched_run import Run, RunWatched, assert_healthy
from tests.schedulers.runs import DDPCHECK, RANK, STEPS, assert_one_report, only_run

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="OpenMPI is not installed")

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2)


@pytest.fixture
def port() -> str:
    return str(free_port())


def test_healthy(unwatched: Run, tmp_path: Path, port: str) -> None:
    """mpirun around ddpcheck: healthy"""
    job = unwatched(*MPIRUN, DDPCHECK, "run", "--", *RANK, "healthy", MASTER_PORT=port)
    assert_healthy(only_run(tmp_path, job), world_size=2, steps=STEPS)


def test_diverging(unwatched: Run, tmp_path: Path, port: str) -> None:
    """mpirun around ddpcheck: replicas diverge"""
    job = unwatched(*MPIRUN, DDPCHECK, "run", "--", *RANK, "diverging", MASTER_PORT=port)
    run = only_run(tmp_path, job)
    assert (run.status, run.report["world_size"]) == (10, 2), str(run)
    assert run.finding("DDP208")["step"] == 2
    assert_one_report(job, "DDP208")


def test_hanging(unwatched: Run, tmp_path: Path, port: str) -> None:
    """mpirun around ddpcheck: rank 1 hangs"""
    watch = (DDPCHECK, "run", "--hang-timeout", 5, "--")
    run = only_run(tmp_path, unwatched(*MPIRUN, *watch, *RANK, "hanging", MASTER_PORT=port))
    assert run.status == 10, str(run)
    assert run.finding("DDP603")["ranks"] == [1]


def test_killed(unwatched: Run, tmp_path: Path, port: str) -> None:
    """mpirun around ddpcheck: a rank is killed"""
    job = unwatched(*MPIRUN, DDPCHECK, "run", "--", *RANK, "killed", MASTER_PORT=port)
    run = only_run(tmp_path, job)
    assert run.status == 128 + signal.SIGKILL, str(run)
    assert run.finding("DDP602")["ranks"] == [1]


def test_around_mpirun(ddpcheck: RunWatched, port: str) -> None:
    """ddpcheck around mpirun: healthy"""
    assert_healthy(ddpcheck(*MPIRUN, *RANK, "healthy", MASTER_PORT=port), world_size=2, steps=STEPS)


def test_around_mpirun_diverging(ddpcheck: RunWatched, port: str) -> None:
    """ddpcheck around mpirun: replicas diverge"""
    watched = ddpcheck(*MPIRUN, *RANK, "diverging", MASTER_PORT=port)
    assert watched.status == 10, str(watched)
    assert watched.finding("DDP208")["step"] == 2

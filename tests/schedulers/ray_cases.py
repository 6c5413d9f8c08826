"""Ray Train on this machine: a cluster that the job starts, and one of two nodes that was started earlier."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, assert_healthy, read_run
from tests.schedulers.runs import DDPCHECK, STEPS

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

JOB = (sys.executable, JOBS / "by_ray.py")


def test_healthy(ddpcheck: RunWatched) -> None:
    """ddpcheck around a driver: healthy, though Ray ends its workers by a signal"""
    assert_healthy(ddpcheck(*JOB, "healthy"), world_size=2, steps=STEPS)


def test_diverging(ddpcheck: RunWatched) -> None:
    """ddpcheck around a driver: replicas diverge"""
    watched = ddpcheck(*JOB, "diverging")
    assert watched.status == 10, str(watched)
    assert watched.finding("DDP208")["step"] == 2


def test_raising(ddpcheck: RunWatched) -> None:
    """ddpcheck around a driver: the training function raises"""
    watched = ddpcheck(*JOB, "raising")
    assert watched.status == 1, str(watched)
    found = watched.finding("DDP602")
    assert (found["ranks"], "bad sample 17" in found["cause"]) == ([1], True)


def test_killed(ddpcheck: RunWatched) -> None:
    """ddpcheck around a driver: a worker is killed"""
    watched = ddpcheck(*JOB, "killed")
    assert watched.status == 1, str(watched)
    assert watched.finding("DDP602")["ranks"] == [1]


def test_hanging(ddpcheck: RunWatched) -> None:
    """ddpcheck around a driver: rank 1 hangs"""
    watched = ddpcheck(*JOB, "hanging", options=("--hang-timeout", 5))
    assert watched.status == 10, str(watched)
    assert watched.finding("DDP603")["ranks"] == [1]


def test_cluster_of_two_nodes_that_was_started_earlier(unwatched: Run, tmp_path: Path) -> None:
    """two nodes started earlier: ddpcheck around a driver is healthy; ddpcheck env and collect find a divergence"""
    job = unwatched(sys.executable, JOBS / "on_ray_cluster.py", DDPCHECK, tmp_path)
    assert job.status == 0, str(job)
    assert_healthy(read_run(job, tmp_path / "watched"), world_size=2, steps=STEPS)
    assert read_run(job, tmp_path / "collected").finding("DDP208")["step"] == 2

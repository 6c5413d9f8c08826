"""Real schedulers on this machine: Slurm with two nodes, OpenMPI's mpirun, and Ray Train.

Each is skipped with a reason where it is not installed. `srun` and `mpirun` around `ddpcheck run` start one launcher
for each rank; all of them use one folder and one of them reports.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.commands import BIN, environment
from tests.helpers.paths import JOBS
from tests.helpers.slurm import slurm_cluster, why_not
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, assert_healthy, read_run

pytestmark = pytest.mark.slow

STEPS = 3
RANK = (sys.executable, JOBS / "by_scheduler.py")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2)
SRUN = ("srun", "--nodes", 2, "--ntasks", 2, "--cpu-bind=none", "--export=ALL")
DDPCHECK = BIN / "ddpcheck"

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="OpenMPI is not installed")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with slurm_cluster() as environ:
        yield environ


def only_run(folder: Path) -> Path:
    """The only run in `folder`/ddpcheck-runs."""
    [run] = [path for path in (folder / "ddpcheck-runs").iterdir() if path.is_dir()]
    return run


@needs_mpirun
def test_mpirun_around_ddpcheck(unwatched: Run, tmp_path: Path) -> None:
    port = str(free_port())
    out = tmp_path / "run"
    job = unwatched(*MPIRUN, DDPCHECK, "run", "--out", out, "--", *RANK, "healthy", MASTER_PORT=port)
    assert_healthy(read_run(job, out), world_size=2, steps=STEPS)


@needs_mpirun
def test_mpirun_without_a_folder_makes_one_report(unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*MPIRUN, DDPCHECK, "run", "--", *RANK, "diverging", MASTER_PORT=str(free_port()))
    run = read_run(job, only_run(tmp_path))
    assert run.status == 10, str(run)
    assert run.report["world_size"] == 2
    assert run.finding("DDP208")["step"] == 2
    # One of the launchers prints the report, to its end.
    assert job.stderr.count("error DDP201") == 1
    assert job.stderr.count("Next: ") == 1


@needs_mpirun
def test_ddpcheck_around_mpirun(ddpcheck: RunWatched) -> None:
    assert_healthy(
        ddpcheck(*MPIRUN, *RANK, "healthy", MASTER_PORT=str(free_port())), world_size=2, steps=STEPS
    )


def test_srun_around_ddpcheck(slurm: dict[str, str], unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "healthy", MASTER_PORT=str(free_port()), **slurm)
    assert_healthy(read_run(job, only_run(tmp_path)), world_size=2, steps=STEPS)


def test_srun_of_a_job_that_diverges(slurm: dict[str, str], unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "diverging", MASTER_PORT=str(free_port()), **slurm)
    run = read_run(job, only_run(tmp_path))
    assert run.status == 10, str(run)
    assert run.finding("DDP208")["step"] == 2
    assert job.stderr.count("error DDP201") == 1


def test_srun_of_a_job_that_hangs(slurm: dict[str, str], unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(
        *(*SRUN, DDPCHECK, "run", "--hang-timeout", 5, "--", *RANK, "hanging"),
        MASTER_PORT=str(free_port()),
        **slurm,
    )
    run = read_run(job, only_run(tmp_path))
    assert run.status == 10, str(run)
    assert run.finding("DDP603")["ranks"] == [1]


def test_srun_of_a_task_that_is_killed(slurm: dict[str, str], unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "killed", MASTER_PORT=str(free_port()), **slurm)
    run = read_run(job, only_run(tmp_path))
    assert run.status == 128 + signal.SIGKILL, str(run)
    assert run.finding("DDP602")["ranks"] == [1]


def test_ddpcheck_around_srun(slurm: dict[str, str], ddpcheck: RunWatched) -> None:
    watched = ddpcheck(*SRUN, *RANK, "healthy", MASTER_PORT=str(free_port()), **slurm)
    assert_healthy(watched, world_size=2, steps=STEPS)


def test_scancel_stops_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    """The user stopped it: no rank died."""
    environ = environment(MASTER_PORT=str(free_port()), **slurm)
    words = [*SRUN, "--job-name=stopped", DDPCHECK, "run", "--out", tmp_path / "run", "--", *RANK, "hanging"]
    command = list(map(str, words))
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        _wait_for_steps(tmp_path / "run")
        subprocess.run(["scancel", "--name=stopped"], env=environ, check=True)
        _, stderr = job.communicate(timeout=120)
    run = WatchedRun(job.returncode, "", stderr, tmp_path / "run", {})
    assert job.returncode != 0, str(run)
    assert {record["signal"] for record in run.node_records("signal")} <= {"SIGTERM", "SIGCONT"}
    report = subprocess.run(
        [DDPCHECK, "report", tmp_path / "run", "--json"], env=os.environ, capture_output=True, text=True
    )
    assert "DDP602" not in report.stdout, report.stdout


def _wait_for_steps(folder: Path) -> None:
    """Until both ranks have taken a step."""
    while True:
        files = list(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
        if len(files) == 2 and all('"params"' in path.read_text() for path in files):
            return
        time.sleep(0.2)


@needs_ray
def test_ray_ends_its_workers_when_the_function_has_returned(ddpcheck: RunWatched) -> None:
    assert_healthy(ddpcheck(sys.executable, JOBS / "by_ray.py", "healthy"), world_size=2, steps=STEPS)


@needs_ray
def test_ray_with_a_function_that_raises(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(sys.executable, JOBS / "by_ray.py", "raising")
    assert watched.status == 1, str(watched)
    found = watched.finding("DDP602")
    assert (found["ranks"], "bad sample 17" in found["cause"]) == ([1], True)


@needs_ray
def test_ray_clusters_of_two_nodes_that_were_started_earlier(unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(sys.executable, JOBS / "on_ray_cluster.py", DDPCHECK, tmp_path)
    assert job.status == 0, str(job)
    first = read_run(job, tmp_path / "watched")
    assert_healthy(first, world_size=2, steps=STEPS)
    second = read_run(job, tmp_path / "collected")
    assert second.finding("DDP208")["step"] == 2

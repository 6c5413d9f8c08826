"""A healthy job with each scheduler that is installed already. `make schedulers` installs them and runs many cases."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.paths import JOBS
from tests.helpers.slurm import slurm_cluster, why_not
from tests.helpers.watched_run import Run, RunWatched, assert_healthy
from tests.schedulers.runs import DDPCHECK, RANK, STEPS, only_run

pytestmark = pytest.mark.slow

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="OpenMPI is not installed")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@needs_mpirun
def test_mpirun_around_ddpcheck(unwatched: Run, tmp_path: Path) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2)
    job = unwatched(*mpirun, DDPCHECK, "run", "--", *RANK, "healthy", MASTER_PORT=str(free_port()))
    assert_healthy(only_run(tmp_path, job), world_size=2, steps=STEPS)


def test_srun_around_ddpcheck(unwatched: Run, tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    srun = ("srun", "--nodes", 2, "--ntasks", 2, "--cpu-bind=none", "--export=ALL")
    with slurm_cluster() as slurm:
        job = unwatched(*srun, DDPCHECK, "run", "--", *RANK, "healthy", MASTER_PORT=str(free_port()), **slurm)
    assert_healthy(only_run(tmp_path, job), world_size=2, steps=STEPS)


@needs_ray
def test_ddpcheck_around_a_ray_driver(ddpcheck: RunWatched) -> None:
    """Ray ends its workers by a signal when the function has returned."""
    assert_healthy(ddpcheck(sys.executable, JOBS / "by_ray.py", "healthy"), world_size=2, steps=STEPS)

"""Ids, tasks and ranks of a job from the variables of its launcher, and the folder that its tasks share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpcheck.config import Config
from ddpcheck.launcher.job_identity import find_job_id, launch_key, local_rank, rank, task_of_job
from ddpcheck.launcher.run_folder import RunFolder, begin_run, make_run_folder
from tests.helpers.commands import _INHERITED_PREFIXES

COMMAND = ["python", "train.py"]
# As the programs set them: OpenMPI 4.1, Slurm 22.05, and Slurm with --mpi=pmix.
OPENMPI = {
    "OMPI_MCA_ess_base_jobid": "1497235457",
    "PMIX_NAMESPACE": "1497235457",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "job", "task"),
    [
        ({}, "", None),
        (OPENMPI, "1497235457", 3),
        (STEP, "7.2", 3),
        ({**STEP, "SLURM_RESTART_COUNT": "1"}, "7.2.1", 3),
        (SCRIPT, "7", None),
        ({**STEP, "PMIX_NAMESPACE": "slurm.pmix.7.2"}, "slurm.pmix.7.2", 3),
        # On the first node, mpirun starts its ranks itself; on others by a step of its daemons.
        ({**SCRIPT, **OPENMPI}, "1497235457.7", 3),
        ({**STEP, **OPENMPI, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "1"}, "1497235457.7", 3),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "1497235457", None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "", 1),
    ],
)
def test_job_and_task(environ: Mapping[str, str], job: str, task: int | None) -> None:
    assert (find_job_id("", COMMAND, environ), task_of_job(environ)) == (job, task)


def test_ranks_of_mpirun_inside_a_job_of_slurm() -> None:
    """All of them inherit the SLURM_PROCID of the script."""
    environ = {**SCRIPT, **OPENMPI}
    assert (rank(environ), local_rank(environ)) == (3, 1)
    assert launch_key(environ) != launch_key({**environ, "OMPI_MCA_ess_base_jobid": "2"})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import os

    for name in list(os.environ):
        if name.startswith((*_INHERITED_PREFIXES, "PMI")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> RunFolder:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    folder = make_run_folder(COMMAND)
    return begin_run(folder, COMMAND, Config(run_dir=str(folder.path)))


def test_tasks_of_a_job_share_a_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [started(monkeypatch, {**OPENMPI, "OMPI_COMM_WORLD_RANK": str(task)}) for task in range(3)]
    assert len({folder.path for folder in folders}) == 1
    assert len({folder.run_id for folder in folders}) == 1
    assert [folder.joined for folder in folders] == [False, True, True]


def test_another_job_gets_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = started(monkeypatch, STEP)
    assert started(monkeypatch, {**STEP, "SLURM_STEP_ID": "3"}).path != first.path


def test_a_second_run_of_the_same_tasks_gets_another_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{**STEP, "SLURM_PROCID": str(task)} for task in range(2)]
    first, second = ([started(monkeypatch, task).path for task in tasks] for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_a_late_task_does_not_join_a_run_that_has_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = started(monkeypatch, {**STEP, "SLURM_PROCID": "0"})
    path = first.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": "now"}))
    assert started(monkeypatch, {**STEP, "SLURM_PROCID": "1"}).path != first.path

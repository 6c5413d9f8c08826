"""Slurm 22.05 with two nodes on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.commands import BIN, CommandResult, environment
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, WatchedRun, assert_healthy, read_run
from tests.schedulers.runs import (
    DDPCHECK,
    RANK,
    STEPS,
    assert_one_report,
    batch_script,
    have_stepped,
    only_run,
    run_quickly,
    runs_in,
    wait_until,
)

Slurm = dict[str, str]
# Two nodes of this machine, with a task on each.
SRUN = ("srun", "--nodes", 2, "--ntasks", 2, "--cpu-bind=none", "--export=ALL")
# For a batch script: commands are those of these tests.
HEAD = f"export MASTER_PORT={{port}} PATH={BIN}:$PATH OMP_NUM_THREADS=1\ncd {{folder}}\n"


@pytest.fixture
def port() -> str:
    return str(free_port())


def test_healthy(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun around ddpcheck: healthy"""
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "healthy", MASTER_PORT=port, **slurm)
    assert_healthy(only_run(tmp_path, job), world_size=2, steps=STEPS)


def test_diverging(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun around ddpcheck: replicas diverge"""
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "diverging", MASTER_PORT=port, **slurm)
    run = only_run(tmp_path, job)
    assert run.status == 10, str(run)
    assert run.finding("DDP208")["step"] == 2
    assert_one_report(job, "DDP208")


def test_hanging(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun around ddpcheck: rank 1 hangs"""
    watch = (DDPCHECK, "run", "--hang-timeout", 5, "--")
    job = unwatched(*SRUN, *watch, *RANK, "hanging", MASTER_PORT=port, **slurm)
    run = only_run(tmp_path, job)
    assert run.status == 10, str(run)
    assert run.finding("DDP603")["ranks"] == [1]


def test_killed(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun around ddpcheck: a task is killed"""
    job = unwatched(*SRUN, DDPCHECK, "run", "--", *RANK, "killed", MASTER_PORT=port, **slurm)
    run = only_run(tmp_path, job)
    assert run.status == 128 + signal.SIGKILL, str(run)
    assert run.finding("DDP602")["ranks"] == [1]


def test_torchrun_in_a_batch_job(slurm: Slurm, tmp_path: Path, port: str) -> None:
    """sbatch, srun around ddpcheck around torchrun, two ranks on each node: healthy"""
    rendezvous = f"--rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint 127.0.0.1:{port}"
    launch = f"torchrun --nnodes 2 --nproc-per-node 2 {rendezvous}"
    job = f"{JOBS / 'on_nodes.py'} --steps 5"
    lines = (
        HEAD.format(port=port, folder=tmp_path)
        + f"srun --ntasks=2 --cpu-bind=none {DDPCHECK} run -- {launch} {job}\n"
    )
    script = batch_script(tmp_path / "batch.sh", lines, {"nodes": 2, "ntasks-per-node": 1})
    run = only_run(tmp_path, _submit_and_wait(script, slurm))
    assert_healthy(run, world_size=4, steps=5)


def test_requeued(slurm: Slurm, tmp_path: Path, port: str) -> None:
    """sbatch: the job is requeued while it trains, and trains to its end at the second start"""
    lines = HEAD.format(port=port, folder=tmp_path) + (
        'case=healthy; [ -n "$SLURM_RESTART_COUNT" ] || case=hanging\n'
        f"srun --ntasks=2 --cpu-bind=none {DDPCHECK} run -- {RANK[0]} {RANK[1]} $case\n"
        "echo ended: $?\n"
    )
    script = batch_script(tmp_path / "again.sh", lines, {"nodes": 2, "ntasks-per-node": 1, "requeue": ""})
    number = _submit(script, slurm)
    wait_until(lambda: any(have_stepped(run, 2) for run in runs_in(tmp_path)), "the first start")
    run_quickly("scontrol", "requeue", number, **slurm)
    output = script.with_suffix(".out")
    wait_until(lambda: output.exists() and "ended: 0" in output.read_text(), "the second start")
    first, second = runs_in(tmp_path)
    # Stopped from outside: no rank died.
    done = subprocess.run([DDPCHECK, "report", first, "--json"], capture_output=True, text=True)
    assert {each["code"] for each in json.loads(done.stdout)["findings"]} <= {"DDP606"}, done.stdout
    assert_healthy(read_run(CommandResult(0, "", output.read_text()), second), world_size=2, steps=STEPS)


def test_cancelled(slurm: Slurm, tmp_path: Path, port: str) -> None:
    """scancel"""
    environ = environment(MASTER_PORT=port, **slurm)
    words = [*SRUN, "--job-name=stopped", DDPCHECK, "run", "--out", tmp_path / "run", "--", *RANK, "hanging"]
    command = list(map(str, words))
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        wait_until(lambda: have_stepped(tmp_path / "run", 2), "a step of both ranks")
        run_quickly("scancel", "--name=stopped", **slurm)
        _, stderr = job.communicate(timeout=120)
    run = WatchedRun(job.returncode, "", stderr, tmp_path / "run", {})
    assert job.returncode != 0, str(run)
    assert {record["signal"] for record in run.node_records("signal")} <= {"SIGTERM", "SIGCONT"}
    report = subprocess.run([DDPCHECK, "report", tmp_path / "run", "--json"], capture_output=True, text=True)
    assert "DDP602" not in report.stdout, report.stdout


def test_signal_before_the_time_limit(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun --time=2 --signal=USR1@30: ranks end by themselves before the time limit"""
    # Slurm may send it up to a minute earlier.
    limit = ("--time=2", "--signal=USR1@30")
    job = unwatched(*SRUN, *limit, DDPCHECK, "run", "--", *RANK, "until_signal", MASTER_PORT=port, **slurm)
    run = only_run(tmp_path, job)
    assert run.status == 0, str(run)
    assert (run.report["verdict"], run.codes("error", "warning")) == ("ok", [])
    assert "told to end: 1" in job.stdout


def test_heterogeneous_step(slurm: Slurm, unwatched: Run, tmp_path: Path, port: str) -> None:
    """srun A : B, a step of two components: replicas diverge"""
    watched = (DDPCHECK, "run", "--", *RANK, "diverging")
    one = ("--nodes", 1, "--ntasks", 1, "--cpu-bind=none", "--export=ALL")
    job = unwatched("srun", *one, *watched, ":", *one, *watched, MASTER_PORT=port, **slurm)
    run = only_run(tmp_path, job)
    assert run.status == 10, str(run)
    assert run.report["world_size"] == 2
    assert run.finding("DDP208")["step"] == 2
    assert_one_report(job, "DDP208")


def test_around_srun(slurm: Slurm, ddpcheck: RunWatched, port: str) -> None:
    """ddpcheck around srun: healthy"""
    watched = ddpcheck(*SRUN, *RANK, "healthy", MASTER_PORT=port, **slurm)
    assert_healthy(watched, world_size=2, steps=STEPS)


def test_around_srun_without_its_variables(slurm: Slurm, ddpcheck: RunWatched, port: str) -> None:
    """ddpcheck around srun --export=NONE: no rank is watched"""
    options = [word for word in SRUN if word != "--export=ALL"]
    watched = ddpcheck(*options, f"--export=MASTER_PORT={port}", *RANK, "healthy", **slurm)
    assert watched.status == 10, str(watched)
    assert watched.finding("DDP601")["evidence"]["unwatched"] == {"remote": "srun"}


def _submit(script: Path, slurm: Slurm) -> str:
    return run_quickly("sbatch", "--parsable", script, **slurm).strip()


def _submit_and_wait(script: Path, slurm: Slurm) -> CommandResult:
    """The exit status of the batch job, and its output as `stderr`."""
    done = subprocess.run(
        ["sbatch", "--wait", script], env=environment(**slurm), capture_output=True, text=True, timeout=600
    )
    return CommandResult(done.returncode, "", script.with_suffix(".out").read_text())

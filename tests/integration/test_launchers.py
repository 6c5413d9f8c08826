"""Every launcher: each rank reports, steps are counted, nothing is found in a healthy job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.commands import BIN
from tests.helpers.paths import JOBS, TRAIN
from tests.helpers.watched_run import Run, RunWatched, assert_healthy, records_in

pytestmark = pytest.mark.slow

STEPS = 3
TORCHRUN = (BIN / "torchrun", "--nproc-per-node", "2")
PYTHON = sys.executable


def test_torchrun(ddpcheck: RunWatched, unwatched: Run) -> None:
    command = (*TORCHRUN, TRAIN, "--epochs", "1")
    watched = ddpcheck(*command)
    assert_healthy(watched, world_size=2, steps=16)
    assert watched.report["command"] == [str(word) for word in command]
    assert "Replicas agree: 2 ranks, 16 steps" in watched.stderr
    assert watched.stdout == unwatched(*command).stdout


def test_spawned_ranks(ddpcheck: RunWatched, unwatched: Run) -> None:
    command = (PYTHON, JOBS / "by_multiprocessing.py", "spawn")
    watched = ddpcheck(*command)
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert watched.stdout == unwatched(*command).stdout


def test_forked_ranks(ddpcheck: RunWatched) -> None:
    assert_healthy(ddpcheck(PYTHON, JOBS / "by_multiprocessing.py", "fork"), world_size=2, steps=STEPS)


def test_ranks_of_a_forkserver(ddpcheck: RunWatched) -> None:
    assert_healthy(ddpcheck(PYTHON, JOBS / "by_multiprocessing.py", "forkserver"), world_size=2, steps=STEPS)


def test_ranks_started_by_a_shell(ddpcheck: RunWatched, tmp_path: Path) -> None:
    script = tmp_path / "ranks.sh"
    script.write_text(
        "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1\n"
        f"RANK=1 python {JOBS}/by_environment.py &\n"
        f"RANK=0 python {JOBS}/by_environment.py && wait $!\n"
    )
    assert_healthy(ddpcheck("sh", script, MASTER_PORT=str(free_port())), world_size=2, steps=STEPS)


def test_accelerate_under_torchrun(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(*TORCHRUN, JOBS / "by_accelerate.py", ACCELERATE_USE_CPU="true")
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert "2 processes, DistributedDataParallel" in watched.stdout


def test_accelerate_that_starts_one_process_only(ddpcheck: RunWatched) -> None:
    """What `--cpu --num_processes 2` does today: there is no DDP, so there is nothing to call healthy."""
    watched = ddpcheck(
        BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", JOBS / "by_accelerate.py"
    )
    assert "1 processes, Linear" in watched.stdout, str(watched)
    assert watched.status == 10
    assert watched.report["verdict"] == "incomplete"
    assert (watched.report["world_size"], watched.report["attempts"]) == (0, [])
    assert watched.codes() == ["DDP601"]
    finding = watched.finding("DDP601")
    assert "No process of the command created a process group" in finding["message"]
    assert "one process" in finding["cause"]


def test_lightning(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(PYTHON, JOBS / "by_lightning.py")
    assert_healthy(watched, world_size=2, steps=STEPS)
    pids = {row["rank"]: row["pid"] for row in watched.report["attempts"][0]["ranks"]}
    for rank, pid in pids.items():
        assert f"rank {rank} took {STEPS} steps in {pid}" in watched.stdout


def test_trainer(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(*TORCHRUN, JOBS / "by_trainer.py")
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert f"{STEPS} steps" in watched.stdout


def test_data_loader_workers_leave_no_trace(ddpcheck: RunWatched) -> None:
    steps = 6  # two with each start method
    watched = ddpcheck(*TORCHRUN, "--standalone", JOBS / "with_workers.py")
    assert_healthy(watched, world_size=2, steps=steps)
    assert len(watched.stdout.splitlines()) == steps
    for rank in range(2):
        records = watched.records(rank)
        assert [record["kind"] for record in records].count("rank") == 1
        assert records[0]["kind"] == "rank"
        assert records[-1]["kind"] == "end"
        assert {record["pid"] for record in records if "pid" in record} == {records[0]["pid"]}
    assert watched.files("*.jsonl") == [
        f"node-{os.uname().nodename}.jsonl",
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]
    notes = records_in(watched.folder / f"node-{os.uname().nodename}.jsonl")
    assert [note for note in notes if note["kind"] in ("leftover", "fault")] == []


def test_by_hand_without_ddpcheck_run(unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*TORCHRUN, JOBS / "auto.py")
    assert job.status == 0, str(job)
    assert job.stderr.count("ddpcheck: checking this job") == 1, str(job)
    [folder] = (tmp_path / "ddpcheck-runs").iterdir()
    shown = unwatched(BIN / "ddpcheck", "report")
    assert shown.status == 0, str(shown)
    assert f"Replicas agree: 2 ranks, {STEPS} steps" in shown.stdout
    report = json.loads(unwatched(BIN / "ddpcheck", "report", folder.name, "--json").stdout)
    assert (report["verdict"], report["world_size"], report["steps"]) == ("ok", 2, STEPS)
    assert [row["status"] for row in report["attempts"][0]["ranks"]] == ["finished", "finished"]
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["rank-00000.jsonl", "rank-00001.jsonl"]


def test_by_hand_in_isolated_mode(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """Spawned ranks inherit -I, so each one comes in by the line at the top of the script."""
    watched = ddpcheck(PYTHON, "-I", JOBS / "auto.py", "spawn")
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert not (tmp_path / "ddpcheck-runs").exists()


def test_isolated_mode_without_the_line(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(PYTHON, "-I", JOBS / "by_multiprocessing.py", "fork")
    assert len(watched.stdout.splitlines()) == STEPS
    assert watched.status == 10, str(watched)
    assert watched.report["verdict"] == "incomplete"
    assert watched.report["exit_code"] == 0
    finding = watched.finding("DDP601")
    assert "-I" in finding["cause"]
    assert "import ddpcheck.auto" in finding["fix"]
    assert "import ddpcheck.auto" in watched.stderr

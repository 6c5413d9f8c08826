"""Every launcher: each rank reports, steps are counted, and a healthy job has no finding.

torchrun itself is in test_promise_identity; Lightning and the Trainer of transformers are in test_real_programs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.corpus.free_port import free_port
from tests.helpers.commands import BIN
from tests.helpers.fork_server import prepared
from tests.helpers.launchers import forked, torchrun
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, assert_healthy

pytestmark = pytest.mark.slow

STEPS = 3
PYTHON = sys.executable


def test_spawned_ranks(ddpcheck: RunWatched, unwatched: Run) -> None:
    command = (PYTHON, JOBS / "by_multiprocessing.py", "spawn")
    watched = ddpcheck(*command)
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert watched.stdout == unwatched(*command).stdout


def test_ranks_of_a_forkserver(ddpcheck: RunWatched) -> None:
    assert_healthy(ddpcheck(PYTHON, JOBS / "by_multiprocessing.py", "forkserver"), world_size=2, steps=STEPS)


def test_forked_ranks(ddpcheck: RunWatched) -> None:
    assert_healthy(ddpcheck(*prepared(JOBS / "by_multiprocessing.py", "fork")), world_size=2, steps=STEPS)


def test_ranks_started_by_a_shell(ddpcheck: RunWatched, tmp_path: Path) -> None:
    script = tmp_path / "ranks.sh"
    script.write_text(
        "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1\n"
        f"RANK=1 python {JOBS}/by_environment.py &\n"
        f"RANK=0 python {JOBS}/by_environment.py && wait $!\n"
    )
    assert_healthy(ddpcheck("sh", script, MASTER_PORT=str(free_port())), world_size=2, steps=STEPS)


def test_accelerate_under_torchrun(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(*torchrun(2, JOBS / "by_accelerate.py"), ACCELERATE_USE_CPU="true")
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert "2 processes, DistributedDataParallel" in watched.stdout


def test_accelerate_that_starts_one_process_only(ddpcheck: RunWatched) -> None:
    """`--cpu --num_processes 2` starts one process without DDP, so ddpcheck cannot call the job healthy."""
    watched = ddpcheck(
        BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", JOBS / "by_accelerate.py"
    )
    assert "1 processes, Linear" in watched.stdout, str(watched)
    assert watched.status == 10
    assert watched.report["verdict"] == "incomplete"
    assert (watched.report["world_size"], watched.report["attempts"]) == (0, [])
    assert watched.codes() == ["DDP601"]


def test_data_loader_workers_are_not_taken_for_ranks(ddpcheck: RunWatched) -> None:
    steps = 6  # two with each start method
    watched = ddpcheck(*forked(2, JOBS / "with_workers.py"))
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
    assert watched.node_records("leftover", "fault") == []


def test_import_ddpcheck_auto_without_ddpcheck_run(unwatched: Run, tmp_path: Path) -> None:
    job = unwatched(*torchrun(2, JOBS / "auto.py"))
    assert job.status == 0, str(job)
    # One rank says where the run folder is.
    assert len([line for line in job.stderr.splitlines() if line.startswith("ddpcheck: ")]) == 1, str(job)
    [folder] = (tmp_path / "ddpcheck-runs").iterdir()
    assert unwatched(BIN / "ddpcheck", "report").status == 0
    report = json.loads(unwatched(BIN / "ddpcheck", "report", folder.name, "--json").stdout)
    assert (report["verdict"], report["world_size"], report["steps"]) == ("ok", 2, STEPS)
    assert [row["status"] for row in report["attempts"][0]["ranks"]] == ["finished", "finished"]
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["rank-00000.jsonl", "rank-00001.jsonl"]


def test_import_ddpcheck_auto_in_isolated_mode(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """Spawned ranks inherit -I, so each one loads ddpcheck by the line at the top of the script."""
    watched = ddpcheck(PYTHON, "-I", JOBS / "auto.py", "spawn")
    assert_healthy(watched, world_size=2, steps=STEPS)
    assert not (tmp_path / "ddpcheck-runs").exists()


def test_isolated_mode_without_the_import(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(PYTHON, "-I", JOBS / "by_multiprocessing.py", "fork")
    assert len(watched.stdout.splitlines()) == STEPS
    assert watched.status == 10, str(watched)
    assert watched.report["verdict"] == "incomplete"
    assert watched.report["exit_code"] == 0
    finding = watched.finding("DDP601")
    assert "-I" in finding["cause"]
    assert "import ddpcheck.auto" in finding["fix"]

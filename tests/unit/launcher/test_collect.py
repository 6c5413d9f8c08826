"""`ddpcheck collect`: the verdict on a run that has no launcher of ours."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpcheck.cli.app import app
from ddpcheck.config import Config
from ddpcheck.errors import UsageError
from ddpcheck.launcher.collect import collect
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.reader import read_run_file
from ddpcheck.reports.outputs import Outputs
from tests.helpers.run_builder import RunBuilder


def built(folder: Path, **description: object) -> RunBuilder:
    builder = RunBuilder(folder, 2).wrap().optimizer()
    builder.description = {"id": "run", "name": "train", "config": {"own_launcher": False}, **description}
    return builder


def collected(folder: Path, *arguments: object) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["collect", str(folder), "--wait", "0", *map(str, arguments)])
    report = folder / "report.json"
    return done.exit_code, json.loads(report.read_text()) if report.exists() else {}


def test_a_healthy_run(tmp_path: Path) -> None:
    built(tmp_path / "run").train(2).end().save()
    status, report = collected(tmp_path / "run", "--quiet")
    assert (status, report["verdict"], report["exit_code"]) == (0, "ok", None)
    assert "ended" in read_run_file(tmp_path / "run")
    # A second time, the run has ended already.
    assert collected(tmp_path / "run")[0] == 0


def test_a_run_that_diverges(tmp_path: Path) -> None:
    built(tmp_path / "run").train(2, outliers={1: ["body.bias"]}).end().save()
    assert collected(tmp_path / "run")[0] == 10
    assert collected(tmp_path / "run", "--fail-on", "never")[0] == 0


def test_the_status_of_the_job(tmp_path: Path) -> None:
    built(tmp_path / "run").train(2).end().save()
    status, report = collected(tmp_path / "run", "--exit-code", 3)
    assert (status, report["verdict"]) == (3, "failed")


def test_a_folder_that_the_ranks_created(tmp_path: Path) -> None:
    builder = built(tmp_path / "run").train(2).end()
    builder.save()
    (tmp_path / "run" / "run.json").unlink()
    assert collected(tmp_path / "run")[0] == 0
    assert "ended" in read_run_file(tmp_path / "run")


def test_ranks_that_still_run(tmp_path: Path) -> None:
    builder = built(tmp_path / "run")
    header = builder.records[1][0]
    assert isinstance(header, RankHeader)
    started = process_start(os.getpid()) or 0
    builder.records[1][0] = replace(header, host=os.uname().nodename, pid=os.getpid(), ticks=started)
    builder.train(2).end(ranks=[0]).save()
    status, report = collected(tmp_path / "run")
    assert status != 0
    assert report["attempts"][0]["ranks"][1]["status"] == "running"  # type: ignore[index]
    assert "ended" not in read_run_file(tmp_path / "run")


def test_a_rank_that_is_gone_without_a_last_record(tmp_path: Path) -> None:
    folder = built(tmp_path / "run").train(2).end(ranks=[0]).save()
    for path in folder.glob("*.jsonl"):
        os.utime(path, (1000.0, 1000.0))
    status, report = collected(folder)
    assert status == 10
    assert [finding["code"] for finding in report["findings"]] == ["DDP602"]  # type: ignore[index, attr-defined]


def test_a_run_with_a_launcher_is_refused(tmp_path: Path) -> None:
    pid = os.getpid()
    own = {"host": os.uname().nodename, "pid": pid, "pid_start": process_start(pid), "config": {}}
    folder = built(tmp_path / "run", **own).train(2).end().save()
    with pytest.raises(UsageError):
        collect(folder, Config(), Outputs(), wait=0.0, exit_code=None)
    assert not (folder / "report.json").exists()


def test_another_host_counts_while_its_files_grow(tmp_path: Path) -> None:
    folder = built(tmp_path / "run").train(2).save()
    assert collected(folder)[0] == 1
    assert "ended" not in read_run_file(folder)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_time_that_cannot_be_waited(tmp_path: Path, seconds: str) -> None:
    done = CliRunner().invoke(app, ["collect", str(tmp_path), "--wait", seconds])
    assert isinstance(done.exception, UsageError)

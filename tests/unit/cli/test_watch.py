"""`ddpcheck watch`: follows a run folder from another process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpcheck.cli.app import app
from ddpcheck.launcher import runs
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.runs import RunFollower
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder

STORED = ROOT / "tests" / "stored_runs"


def watched(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["watch", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", [path.name for path in sorted(STORED.iterdir())])
def test_every_stored_run_can_be_watched(name: str) -> None:
    assert "ranks" in watched(STORED / name, "--once")


def test_an_ended_run_shows_its_verdict(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", 2).wrap().optimizer().train(2)
    text = watched(builder.train(2, first=2, outliers={1: ["body.bias"]}).end().save())
    assert "replicas diverge at step 2 (outlier: ranks 0-1)" in text
    assert "Replicas diverge at step 2" in text
    assert "error DDP201" in text


def begun(folder: Path, **description: object) -> RunBuilder:
    builder = RunBuilder(folder, 2).wrap().optimizer().train(2)
    builder.description = {
        "name": "train",
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "started": "2026-01-01T10:00:00+00:00",
        **description,
    }
    builder.save()
    return builder


def test_a_running_job_shows_its_state(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    text = watched(tmp_path / "run", "--once")
    assert "train  running, 2 ranks" in text
    assert "2 steps   replicas agree, 2 steps compared" in text
    assert "Replicas" not in text


def test_a_killed_launcher_is_reported(tmp_path: Path) -> None:
    begun(tmp_path / "run", pid_start=1)
    text = watched(tmp_path / "run")
    assert "its launcher is gone" in text


def test_following_continues_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = begun(tmp_path / "run")
    turns: list[float] = []

    def go_on(seconds: float) -> None:
        turns.append(seconds)
        builder.step(1 + len(turns))
        if len(turns) == 3:
            builder.end([0])
            builder.description.update(ended="now", seconds=12.5, exit_code=0)
        builder.save()

    monkeypatch.setattr(runs.time, "sleep", go_on)
    states = list(RunFollower(tmp_path / "run"))
    assert [state.steps for state in states] == [2, 3, 4, 5]
    assert [state.ended for state in states] == [False, False, False, True]
    assert states[-1].seconds == 12.5
    assert [rank.status for rank in states[-1].ranks] == ["finished", "vanished"]


def test_without_a_launcher_the_run_ends_with_its_ranks(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", 2).wrap().optimizer().train(2)
    builder.save()
    (tmp_path / "run" / "run.json").unlink()
    assert not RunFollower(tmp_path / "run").read_state().ended
    builder.end().save()
    (tmp_path / "run" / "run.json").unlink()
    assert RunFollower(tmp_path / "run").read_state().ended


def test_a_damaged_run_file_is_ignored(tmp_path: Path) -> None:
    builder = begun(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps(builder.description)[:20])
    assert "replicas agree" in watched(tmp_path / "run", "--once")

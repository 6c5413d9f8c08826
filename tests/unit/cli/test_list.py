"""`ddpcheck list`: every folder has a row, whatever it contains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.cli.app import app
from ddpcheck.errors import RunNotFound
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.stored_report import write_report
from tests.helpers.run_builder import RunBuilder


def listed(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["list", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def put(folder: Path, started: str, *, reported: bool = True, **description: Any) -> Path:
    builder = RunBuilder(folder, 2).wrap().optimizer().train(3, outliers={1: ["body.bias"]}).end()
    builder.description.update(name="train", started=started, seconds=75.2, **description)
    path = builder.save()
    if reported:
        write_report(analyse_run(path), path)
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    runs = tmp_path / "ddpcheck-runs"
    me = {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": process_start(os.getpid())}
    put(runs / "20260101-100000-train", "2026-01-01T10:00:00+00:00")
    put(runs / "20260103-100000-train", "2026-01-03T10:00:00+00:00", reported=False)
    for name, more in (("20260104-100000-now", me), ("20260102-100000-gone", {**me, "pid_start": 1})):
        path = put(runs / name, f"{name[:4]}-{name[4:6]}-{name[6:8]}T10:00:00+00:00", reported=False, **more)
        description = json.loads((path / "run.json").read_text())
        del description["ended"]
        (path / "run.json").write_text(json.dumps(description))
    (runs / "holiday-photos").mkdir()
    (runs / "holiday-photos" / "beach.jpg").write_bytes(b"x" * 1500)
    torn = put(runs / "20260105-100000-torn", "2026-01-05T10:00:00+00:00", reported=False)
    (torn / "run.json").write_text('{"name": "tr')
    (runs / "a-file").write_text("no folder")
    return runs


def test_newest_first_with_state(runs: Path) -> None:
    document = json.loads(listed(runs, "--json"))
    assert document["schema"] == 1
    results = {run["folder"]: run for run in document["runs"]}
    assert {folder: run["state"] for folder, run in results.items()} == {
        "20260101-100000-train": "findings",
        "20260102-100000-gone": "unfinished",
        "20260103-100000-train": "unreported",
        "20260104-100000-now": "running",
        "20260105-100000-torn": "torn",
        "holiday-photos": "foreign",
    }
    dated = [folder for folder in results if folder.startswith("202601") and "torn" not in folder]
    assert dated == sorted(dated, reverse=True)
    first = results["20260101-100000-train"]
    assert (first["world_size"], first["steps"], first["seconds"]) == (2, 3, 75.2)
    assert first["codes"][0] == "DDP201"
    assert first["size"] == sum(
        path.stat().st_size for path in (runs / first["folder"]).rglob("*") if path.is_file()
    )
    assert results["holiday-photos"]["size"] == 1500


def test_the_table_fits_and_does_not_cut_names(runs: Path) -> None:
    rows = listed(runs).splitlines()
    assert rows[0].split() == ["run", "ranks", "steps", "duration", "verdict", "size", "findings"]
    assert max(map(len, rows)) <= 80
    [row] = [row for row in rows if row.startswith("20260101")]
    assert row.split()[:5] == ["20260101-100000-train", "2", "3", "1:15", "findings"]


@pytest.mark.parametrize(
    "damage", ["", "{", "null", '{"verdict": 1, "world_size": "x"}', '{"verdict": "ok"}', "\x00"]
)
def test_a_damaged_report_is_torn(runs: Path, damage: str) -> None:
    (runs / "20260101-100000-train" / "report.json").write_text(damage)
    assert "torn" in next(row for row in listed(runs).splitlines() if row.startswith("20260101"))


def test_no_runs_and_no_folder(tmp_path: Path) -> None:
    assert "No runs in" in listed(tmp_path)
    with pytest.raises(RunNotFound, match="create a run with"):
        CliRunner().invoke(app, ["list", str(tmp_path / "nowhere")], catch_exceptions=False)


def test_a_folder_without_runs_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(RunNotFound, match="contains no runs"):
        listed(tmp_path)

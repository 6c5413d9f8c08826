"""report.json stands for the run until something in its folder changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.cli.app import app
from ddpcheck.launcher.stored_report import MARK_FILE, read_report, write_report
from ddpcheck.records.reader import REPORT_FILE
from ddpcheck.run_mark import mark_of
from tests.helpers.paths import ROOT


@pytest.fixture(params=["2-learning-rate", "1-sound", "3-folded"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "stored_runs" / request.param, folder)
    write_report(analyse_run(folder), folder, mark_of(folder))
    return folder


def shown(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("option", ["--verbose", "--json"])
def test_it_shows_what_the_records_show(run: Path, option: str) -> None:
    assert read_report(run) is not None
    from_report = shown(run, option)
    (run / MARK_FILE).unlink()
    assert read_report(run) is None
    assert shown(run, option) == from_report


def test_a_moved_run_has_its_new_path(run: Path) -> None:
    moved = run.rename(run.with_name("moved"))
    report = read_report(moved)
    assert report is not None
    assert report.run["path"] == str(moved)


def test_a_change_is_noticed(run: Path) -> None:
    path = run / "rank-00000.jsonl"
    times = path.stat()
    for change in (
        lambda: path.write_bytes(path.read_bytes() + b"{}\n"),
        lambda: os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**12)),
        lambda: (run / "rank-00007.jsonl").touch(),
        lambda: (run / REPORT_FILE).write_text((run / REPORT_FILE).read_text().replace(": 2", ": 3", 1)),
        lambda: (run / REPORT_FILE).write_bytes(b"\xff"),
        lambda: (run / MARK_FILE).write_text("[" * 100_000),
        lambda: (run / MARK_FILE).write_text(
            json.dumps({**json.loads((run / MARK_FILE).read_text()), "ddpcheck": "0.0.1"})
        ),
    ):
        other = run.with_name("other")
        shutil.copytree(run, other)
        assert read_report(run) is not None
        change()
        assert read_report(run) is None
        shutil.rmtree(run)
        other.rename(run)

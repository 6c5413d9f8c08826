"""Further reports: if one fails, the others and the verdict are not affected."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ddpcheck.reports.outputs import Outputs, page_of, write_outputs
from tests.helpers.sample_reports import stored

EVERYTHING = Outputs("", Path("j.xml"), Path("r.md"), Path("c.json"), github=True)


def test_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = io.StringIO()
    summary = tmp_path / "summary"
    environment = {"GITHUB_STEP_SUMMARY": str(summary)}
    assert write_outputs(stored("1-learning-rate"), EVERYTHING, tmp_path, stdout, environment)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["c.json", "j.xml", "r.md", "report.html", "summary"]
    assert stdout.getvalue().startswith("::error file=examples/train.py,")
    assert summary.read_text() == (tmp_path / "r.md").read_text()


def test_nothing_is_written_unless_requested(tmp_path: Path) -> None:
    stdout = io.StringIO()
    assert write_outputs(
        stored("1-sound"), Outputs(), tmp_path, stdout, {"GITHUB_STEP_SUMMARY": str(tmp_path / "s")}
    )
    assert list(tmp_path.iterdir()) == []
    assert stdout.getvalue() == ""


def test_a_report_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> str:
        raise RecursionError("too deep")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddpcheck.reports.html.page.to_html", fail)
    assert not write_outputs(stored("1-sound"), EVERYTHING, tmp_path, io.StringIO(), {})
    assert "report.html could not be made (RecursionError: too deep)" in capsys.readouterr().err
    assert (tmp_path / "j.xml").exists()
    assert not (tmp_path / "report.html").exists()


def test_where_the_page_goes(tmp_path: Path) -> None:
    assert page_of(Outputs(), tmp_path) is None
    assert page_of(Outputs(html=""), tmp_path) == tmp_path / "report.html"
    assert page_of(Outputs(html="x.html"), tmp_path) == Path("x.html")

"""`ddpcheck report`: which run is meant, and what is printed of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpcheck.__main__ import main
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.cli.run_lookup import find_run
from ddpcheck.errors import RunNotFound, RunUnreadable, UsageError


def make_runs(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "run.json").write_text("{}")
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "20270101-000000-not-a-run").mkdir(parents=True)
    return make_runs(
        tmp_path / "runs", "20260102-101500-train", "20260101-101500-train", "20260101-111500-eval"
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "20260102-101500-train"),
        ("20260101-101500-train", "20260101-101500-train"),
        ("20260102", "20260102-101500-train"),
        ("20260101-11", "20260101-111500-eval"),
        ("eval", "20260101-111500-eval"),
    ],
)
def test_names(runs: Path, given: str | None, found: str) -> None:
    assert find_run(given, runs) == runs / found


def test_a_folder_is_taken_as_it_is(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "rank-00000.jsonl").touch()
    assert find_run(str(folder), runs) == folder


@pytest.mark.parametrize("given", ["train", "20260101"])
def test_more_than_one(runs: Path, given: str) -> None:
    with pytest.raises(UsageError, match="means 2 runs"):
        find_run(given, runs)


def test_none(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"no run 'zzz'.*holds 20260102-101500-train"):
        find_run("zzz", runs)
    with pytest.raises(RunNotFound, match="no run ''"):
        find_run("", runs)
    with pytest.raises(RunNotFound, match="not a run folder"):
        find_run(str(tmp_path), runs)
    with pytest.raises(RunNotFound, match="ddpcheck run -- COMMAND"):
        find_run(None, tmp_path / "nowhere")


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The analysis, replaced by one that only says which runs it was given."""
    asked: list[Path] = []

    def analyse_run(path: Path, *, course: bool = False) -> Report:
        asked.append(path)
        if path.name == "torn":
            raise RunUnreadable("nothing in torn can be read")
        return Report(Verdict.FAILED, 2, 3, ("train",), 1, (), (), ())

    module = ModuleType("ddpcheck.analysis.report_builder")
    module.analyse_run = analyse_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddpcheck.analysis.report_builder", module)
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path / "ddpcheck-runs", "20260101-101500-train", "torn")
    return asked


def test_terminal_on_stdout(analysed: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["report", "train"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("The command failed with status 1")
    assert analysed == [Path("ddpcheck-runs/20260101-101500-train")]


def test_json_on_stdout(analysed: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["report", "train", "--json"])
    assert leaving.value.code == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "failed"


def test_further_reports(analysed: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["report", "--html", "train", "--junit", "j.xml", "--markdown", "r.md", "--github"])
    assert leaving.value.code == 0
    page = Path("ddpcheck-runs/20260101-101500-train/report.html")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert Path("j.xml").read_text().startswith("<?xml")
    assert Path("r.md").read_text().startswith("## ")
    assert f"Page:  {page}" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_said_and_fails(
    analysed: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(SystemExit) as leaving:
        main(["report", "train", "--markdown", "r.md"])
    assert leaving.value.code == 1
    assert "r.md could not be written: No space left on device" in capsys.readouterr().err
    assert list(Path().glob("*r.md*")) == [], "half a file was left"


def test_unreadable(analysed: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["report", "torn"])
    assert leaving.value.code == 1
    assert capsys.readouterr().err == "ddpcheck: nothing in torn can be read\n"

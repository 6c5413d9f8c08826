"""The run folder that the user refers to, and options that commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.cli.options import find_run, with_html_value
from ddpcheck.errors import RunNotFound, UsageError


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
    ("given", "findings"),
    [
        (None, "20260102-101500-train"),
        ("20260101-101500-train", "20260101-101500-train"),
        ("20260102", "20260102-101500-train"),
        ("20260101-11", "20260101-111500-eval"),
        ("eval", "20260101-111500-eval"),
        ("eva", "20260101-111500-eval"),
        ("1115", "20260101-111500-eval"),
    ],
)
def test_names(runs: Path, given: str | None, findings: str) -> None:
    assert find_run(given, runs) == runs / findings


def test_an_existing_run_folder_is_used(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "rank-00000.jsonl").touch()
    assert find_run(str(folder), runs) == folder


@pytest.mark.parametrize("given", ["train", "20260101"])
def test_more_than_one(runs: Path, given: str) -> None:
    with pytest.raises(UsageError, match="matches 2 runs"):
        find_run(given, runs)


def test_none(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"no run 'zzz'.*contains 20260102-101500-train"):
        find_run("zzz", runs)
    with pytest.raises(RunNotFound, match="no run ''"):
        find_run("", runs)
    with pytest.raises(RunNotFound, match="not a run folder"):
        find_run(str(tmp_path), runs)
    with pytest.raises(RunNotFound, match="ddpcheck run -- COMMAND"):
        find_run(None, tmp_path / "nowhere")


def test_runs_of_a_folder_above_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(tmp_path / "ddpcheck-runs", "20260101-101500-train")
    (tmp_path / "src" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "src" / "model")
    assert find_run("train") == tmp_path / "ddpcheck-runs" / "20260101-101500-train"
    make_runs(tmp_path / "src" / "model" / "ddpcheck-runs", "20260102-101500-train")
    assert find_run(None) == Path("ddpcheck-runs/20260102-101500-train")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--html -- true", "--html= -- true"),
        ("--html page.html -- true", "--html page.html -- true"),
        ("--html page.htm -- true", "--html page.htm -- true"),
        ("--html page -- true", "--html page -- true"),
        ("--html --live -- true", "--html= --live -- true"),
        ("--html true page.html", "--html= true page.html"),
        ("--html page.html true", "--html page.html true"),
        ("-- torchrun --html", "-- torchrun --html"),
    ],
)
def test_a_page_has_a_name_or_not(given: str, expected: str) -> None:
    assert with_html_value(given.split()) == expected.split()

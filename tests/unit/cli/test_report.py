"""`ddpcheck report`: what it prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpcheck.__main__ import main
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.errors import RunUnreadable
from tests.helpers.profiled_run import profiled_run
from tests.helpers.run_builder import RunBuilder


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replaces the analysis; records the runs that it gets."""
    asked: list[Path] = []

    def analyse_run(path: Path, **options: object) -> Report:
        asked.append(path)
        if path.name == "torn":
            raise RunUnreadable("nothing in torn can be read")
        return Report(Verdict.FAILED, 2, 3, ("train",), 1, (), (), ())

    module = ModuleType("ddpcheck.analysis.report_builder")
    module.analyse_run = analyse_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddpcheck.analysis.report_builder", module)
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-101500-train", "torn"):
        (tmp_path / "ddpcheck-runs" / name).mkdir(parents=True)
        (tmp_path / "ddpcheck-runs" / name / "run.json").write_text("{}")
    return asked


def test_terminal_on_stdout(analysed: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["report", "train"])
    assert leaving.value.code == 0
    assert "\nThe command failed with status 1" in capsys.readouterr().out
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
    assert f"Page: {page}" in capsys.readouterr().out


def test_an_output_that_cannot_be_written_fails_the_command(
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


def status(*arguments: object) -> object:
    with pytest.raises(SystemExit) as leaving:
        main(["report", *map(str, arguments)])
    return leaving.value.code


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return profiled_run(tmp_path / "ddpcheck-runs" / "20260101-101500-train")


def events(path: Path) -> list[dict[str, object]]:
    return list(json.loads(path.read_text())["traceEvents"])


def test_trace_in_the_run_folder_or_in_out(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(profiled, "--trace") == 0
    assert (profiled / "timeline.json.gz").exists()
    assert "Wrote one timeline of 2 ranks" in capsys.readouterr().out
    assert status(profiled, "--trace", "all.json") == 0
    assert status("--trace", "latest.json") == 0
    assert Path("latest.json").read_text() == Path("all.json").read_text()


def test_trace_has_only_complete_steps(profiled: Path) -> None:
    assert status(profiled, "--trace", "all.json") == 0
    names = {event["name"] for event in events(Path("all.json"))}
    assert "step 5" in names
    assert "step 6" not in names


def test_report_of_a_profiled_run(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(profiled, "--json") == 0
    overlap = json.loads(capsys.readouterr().out)["overlap"]
    assert [(rank["comm_ns"], rank["overlap_ns"]) for rank in overlap["ranks"]] == [
        (60_000, 30_000),
        (50_000, 20_000),
    ]
    assert [rank["exposed_transfer_ns"] for rank in overlap["ranks"]] == [30_000, 30_000]
    assert overlap["steps"] == [
        {"step": 5, "took_ns": 100_000, "exposed_transfer_ns": 30_000, "exposed_wait_ns": 0}
    ]
    [bucket] = overlap["buckets"]
    assert (bucket["bytes"], bucket["transfer_ns"], bucket["last_rank"]) == (4000, 50_000, 1)
    assert [part["wait_ns"] for part in bucket["ranks"]] == [10_000, 0]


def test_a_missing_trace_is_listed(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(profiled.glob("traces/*rank1*")).unlink()
    assert status(profiled, "--trace", "all.json") == 0
    assert "left out: there is no file" in capsys.readouterr().err
    assert status(profiled, "--json") == 0
    overlap = json.loads(capsys.readouterr().out)["overlap"]
    assert [rank["rank"] for rank in overlap["ranks"]] == [0]
    assert overlap["ranks"][0]["exposed_transfer_ns"] is None
    assert "there is no file" in overlap["left_out"][0]


def test_an_invalid_trace_is_left_out(profiled: Path) -> None:
    for path in profiled.glob("traces/*"):
        path.write_text("{}")
    assert status(profiled) == 0
    assert status(profiled, "--trace", "all.json") == 1


def test_nothing_was_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunBuilder(tmp_path, 2).wrap().train(2).end().save()
    assert status(tmp_path, "--trace") == 1
    assert "use `ddpcheck run --profile`" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["out.json"], ["--trace", "out.txt"]])
def test_wrong_usage(profiled: Path, arguments: list[str]) -> None:
    assert status(profiled, *arguments) == 2

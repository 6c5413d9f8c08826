"""`ddpcheck report RUN --trace [OUT]`: one timeline of what a run profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from ddpcheck.records.kinds.profile import TraceRecord
from tests.helpers.run_builder import RunBuilder
from tests.helpers.trace_builder import all_reduce, described, kernel, step, write


def status(*arguments: object) -> object:
    with pytest.raises(SystemExit) as leaving:
        main(["report", *map(str, arguments)])
    return leaving.value.code


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ranks with a trace of one whole step each, and of another that was cut off."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ddpcheck-runs" / "20260101-101500-train"
    (folder / "traces").mkdir(parents=True)
    build = RunBuilder(folder, 2).wrap().train(6)
    for rank in (0, 1):
        events = [step(5, 0, 100), *kernel("gemm", 10, 50, launched=5)]
        events += all_reduce(20 + 10 * rank, 80, launched=8, **described(1000))
        events += [step(6, 100, 110), *kernel("gemm", 101, 109, launched=100)]
        name = f"traces/node0_10{rank}_rank{rank}.1.pt.trace.json"
        write(folder / name, events, rank=rank)
        build.say(rank, TraceRecord(file=name, first=5, end=6))
    build.end().save()
    return folder


def events(path: Path) -> list[dict[str, object]]:
    return list(json.loads(path.read_text())["traceEvents"])


def test_beside_the_run_or_where_one_wants_it(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(profiled, "--trace") == 0
    assert (profiled / "timeline.json.gz").exists()
    assert "One timeline of 2 ranks is in" in capsys.readouterr().out
    assert status(profiled, "--trace", "all.json") == 0
    assert status("--trace", "latest.json") == 0
    assert Path("latest.json").read_text() == Path("all.json").read_text()


def test_only_whole_steps(profiled: Path) -> None:
    assert status(profiled, "--trace", "all.json") == 0
    names = {event["name"] for event in events(Path("all.json"))}
    assert "step 5" in names
    assert "step 6" not in names


def test_what_the_report_says_of_it(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_trace_that_is_gone_is_named(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(profiled.glob("traces/*rank1*")).unlink()
    assert status(profiled, "--trace", "all.json") == 0
    assert "left out: there is no file" in capsys.readouterr().err
    assert status(profiled, "--json") == 0
    overlap = json.loads(capsys.readouterr().out)["overlap"]
    assert [rank["rank"] for rank in overlap["ranks"]] == [0]
    assert overlap["ranks"][0]["exposed_transfer_ns"] is None
    assert "there is no file" in overlap["left_out"][0]


def test_a_trace_that_makes_no_sense_costs_only_itself(profiled: Path) -> None:
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

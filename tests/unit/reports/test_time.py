"""The table of time on the terminal and in report.json."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.report import render
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder
from tests.unit.analysis.timing.test_table import clocks, say

SCHEMA = ROOT / "docs" / "report.schema.json"


def built(folder: Path, world_size: int, late: int = 10_000) -> RunBuilder:
    made = clocks(world_size, more=lambda rank, _: {"data": late} if rank == 1 else {})
    build = say(RunBuilder(folder, world_size).wrap().train(40), made)
    for rank in made:
        build.say(rank, ClockRecord(0, ddp={"communication": 9_000, "overlap": 500}))
    return build.end()


def drawn(build: RunBuilder, width: int = 80) -> list[str]:
    out = io.StringIO()
    render(build.report(), Console(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    return lines[lines.index(next(line for line in lines if line.startswith("Time of a step"))) :]


def test_a_bar_for_each_rank(tmp_path: Path) -> None:
    lines = drawn(built(tmp_path, 2))
    assert lines[0] == "Time of a step  ms, means of 35 steps"
    assert " ".join(lines[1].split()) == "rank step d data f fwd b bwd o opt . other ! wait"
    first, second = lines[2].split(), lines[3].split()
    assert first[:8] == ["0", "63.0", "1.00", "20.0", "25.0", "2.00", "2.00", "13.0"]
    assert second[:8] == ["1", "63.0", "11.0", "20.0", "25.0", "2.00", "2.00", "3.00"]
    assert {len(first[8]), len(second[8])} == {18}
    assert first[8].count("!") > second[8].count("!")
    assert "efficiency 87 %: 2 ranks do the work of 1.75" in lines[6]
    # A rank waits 13 ms, the other 3 ms.
    assert lines[7].strip() == "cross-check: a mean wait of 8.00 ms, by DDP's own clock 8.50 ms"
    assert max(map(len, lines[:8])) <= 80


def test_of_many_ranks_those_at_both_ends(tmp_path: Path) -> None:
    lines = drawn(built(tmp_path, 12))
    shown = [line.split()[0] for line in lines[2:10]]
    assert "1" in shown
    assert len(shown) == 8
    assert "the other 4 ranks are in report.json" in lines[10]


def test_a_short_job_has_no_table(tmp_path: Path) -> None:
    build = say(RunBuilder(tmp_path, 2).wrap().train(5), clocks(2, steps=5)).end()
    out = io.StringIO()
    render(build.report(), Console(file=out, width=80))
    assert "Time of a step" not in out.getvalue()


def test_report_json_holds_it_and_gives_it_back(tmp_path: Path) -> None:
    report = built(tmp_path, 2).report()
    text = to_json(report)
    assert from_json(text).time == report.time
    [table] = json.loads(text)["time"]
    assert table["straggler"]["ranks"] == [1]
    assert table["ranks"][0]["parts"]["wait"] == {
        "median_us": 13000,
        "p90_us": 13000,
        "mean_us": 13000,
        "share": 0.2063,
    }


def test_it_follows_the_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(to_json(built(tmp_path, 2).report())), json.loads(SCHEMA.read_text()))

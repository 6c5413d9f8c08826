"""Step time, scaling and overlap as views."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.report import Detail, render
from tests.helpers.overlap_builder import advice, overlap
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import stored, with_parts
from tests.unit.analysis.timing.test_table import add_clocks, clocks

SCHEMA = ROOT / "docs" / "report.schema.json"


def built(folder: Path, world_size: int, late: int = 10_000) -> RunBuilder:
    series = clocks(world_size, more=lambda rank, _: {"data": late} if rank == 1 else {})
    build = add_clocks(RunBuilder(folder, world_size).wrap().train(40), series)
    for rank in series:
        build.add(rank, ClockRecord(0, ddp={"communication": 9_000, "overlap": 500}))
    return build.end()


def drawn(build: RunBuilder, width: int = 80) -> list[str]:
    out = io.StringIO()
    render(build.report(), Console(file=out, width=width, color_system=None), detail=Detail.ALL)
    lines = out.getvalue().splitlines()
    return lines[lines.index(next(line for line in lines if line.startswith("Step time"))) :]


def test_a_bar_for_each_rank(tmp_path: Path) -> None:
    lines = drawn(built(tmp_path, 2))
    assert lines[0] == "Step time  ms, mean of 35 steps, without ddpcheck's own time"
    assert " ".join(lines[1].split()) == "rank step data fwd bwd opt other wait .other !wait"
    first, second = lines[2].split(), lines[3].split()
    assert first[:8] == ["0", "63.0", "1.00", "20.0", "25.0", "2.00", "2.00", "13.0"]
    assert second[:8] == ["1", "63.0", "11.0", "20.0", "25.0", "2.00", "2.00", "3.00"]
    assert {len(first[8]), len(second[8])} == {20}
    assert first[8].count("!") > second[8].count("!")
    assert lines[5].strip() == "Scaling efficiency 87 % (1.75x one rank)"
    # A rank waits 13 ms, the other 3 ms.
    assert lines[6].strip() == "Cross-check: mean wait 8.00 ms, by DDP's own logger 8.50 ms"
    assert max(map(len, lines[:8])) <= 80


def test_of_many_ranks_those_at_both_ends(tmp_path: Path) -> None:
    lines = drawn(built(tmp_path, 12))
    shown = [line.split()[0] for line in lines[2:10]]
    assert "1" in shown
    assert len(shown) == 8
    assert "8 of 12 ranks are shown" in lines[10]


def test_a_short_job_has_no_table(tmp_path: Path) -> None:
    build = add_clocks(RunBuilder(tmp_path, 2).wrap().train(5), clocks(2, steps=5)).end()
    out = io.StringIO()
    render(build.report(), Console(file=out, width=80), detail=Detail.ALL)
    assert "Step time" not in out.getvalue()


def test_it_round_trips_through_report_json(tmp_path: Path) -> None:
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


def rendered(refaults: dict[str, Any] | None) -> str:
    table = {**measurements(ranks=2, late=1)["time"][0], "refaults": refaults}
    console = Console(file=io.StringIO(), width=80)
    render(with_parts(stored("1-learning-rate"), {"time": [table]}), console, detail=Detail.ALL)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_page_faults_that_take_much_of_the_step() -> None:
    text = rendered({"rank": 1, "faults": 2_500, "share": 0.5})
    assert "Up to 2,500 page faults per step, 50 % of the step in the kernel" in text
    assert "MALLOC_TRIM_THRESHOLD_" in text


def test_no_note_without_page_faults() -> None:
    assert "page faults" not in rendered(None)


def report(profiled: Overlap | None) -> Report:
    return Report(Verdict.OK, 2, 10, ("torchrun", "train.py"), 0, (), (), (), overlap=profiled)


def shown(profiled: Overlap | None) -> str:
    out = io.StringIO()
    render(report(profiled), Console(file=out, width=80), detail=Detail.ALL)
    return out.getvalue()


def test_a_row_and_a_bar_for_each_rank() -> None:
    lines = shown(overlap()).splitlines()
    assert "Overlap in steps 5-7  mean per step; a step takes 100.0 ms" in lines
    [row] = [line.split() for line in lines if line.startswith("  1  ")]
    assert row[:10] == ["1", "40.0", "ms", "25.0", "%", "30.0", "ms", "5.0", "ms", "3x"]
    assert row[10].count("#") == 12
    assert row[10].count("!") == 8
    assert max(map(len, lines)) <= 80


def test_many_ranks_are_counted() -> None:
    assert "8 of 100 ranks are shown" in shown(overlap(ranks=100))


def test_nothing_where_nothing_was_profiled() -> None:
    assert "Overlap" not in shown(None)


def test_reasons_for_missing_expectations() -> None:
    text = shown(replace(overlap(), ranks=(), steps=(), buckets=(), left_out=("rank 1 left no trace",)))
    assert "Overlap\n  rank 1 left no trace" in text


def test_a_profile_of_the_program_itself_is_named_as_such() -> None:
    assert "(profile of the training script)" in shown(replace(overlap(), source="user"))


def test_json_and_back() -> None:
    complete = report(replace(overlap(), advice=advice(), left_out=("rank 3 left no trace",)))
    assert from_json(to_json(complete)) == complete
    assert from_json(to_json(report(None))).overlap is None


def test_overlap_follows_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    complete = report(replace(overlap(), advice=advice(), left_out=("rank 3 left no trace",)))
    jsonschema.validate(json.loads(to_json(complete)), schema)

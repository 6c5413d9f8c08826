"""The tables of memory and start-up: short, and left out for small models."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ddpcheck.analysis.report import Report
from ddpcheck.records.kinds.memory import MemoryPartsRecord, MemoryRecord
from ddpcheck.records.kinds.startup import StartupRecord
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.report import Detail, render
from ddpcheck.reports.views.memory import memory_curves
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder
from tests.unit.analysis.startup.test_collector import load, way

MB = 10**6
SCHEMA = ROOT / "docs" / "report.schema.json"


def report_of(folder: Path, world_size: int = 4, size: int = 500 * MB) -> Report:
    build = RunBuilder(folder, world_size).wrap().train(1)
    for rank in range(world_size):
        for record in way(load(size)):
            build.add(rank, record if record.stage != "broadcast" else replace(record, bytes=size))
        parts = {"parameters": size, "gradients": size, "buckets": size, "state": 2 * size, "base": 200 * MB}
        build.add(rank, MemoryPartsRecord(0, 0, 1, **parts))
        for step in range(20):
            build.add(rank, MemoryRecord(step, 200 * MB + 5 * size + rank * MB, 200 * MB + 4 * size + 9 * MB))
    return build.end().report()


def shown(report: Report, width: int = 80) -> list[str]:
    out = io.StringIO()
    render(report, Console(file=out, width=width), detail=Detail.ALL)
    return out.getvalue().splitlines()


def test_two_short_tables(tmp_path: Path) -> None:
    lines_shown = shown(report_of(tmp_path))
    lines = [" ".join(line.split()) for line in lines_shown]
    at = lines.index("Start-up s")
    assert lines[at + 1] == "rank python torch group load script wrap batch step read total"
    assert lines[at + 2] == "0 0.50 1.50 0.25 2.00 3.25 2.50 0.50 1.00 500.0 MB 12.50"
    assert "4 ranks read 2.0 GB" in lines[at + 6]
    at = lines.index("Memory of the processes MB")
    assert lines[at + 2] == "0-3 2,703 500 500 500 1,000 0 9.0 200"
    assert max(map(len, lines_shown)) <= 80


def test_copies_have_a_column_where_there_were_any(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(1)
    for rank in range(2):
        copy = StartupRecord("copy", 106.0, 0.5, via="Module.to", bytes=500 * MB, device=500 * MB)
        for record in way(copy):
            build.add(rank, record)
    text = "\n".join(shown(build.end().report()))
    assert "copy" in text
    assert "1.0 GB were copied to devices at 1.0 GB/s." in " ".join(text.split())


def test_a_small_model_shows_neither(tmp_path: Path) -> None:
    text = "\n".join(shown(report_of(tmp_path, size=MB)))
    assert "Start-up" not in text
    assert "Memory" not in text


def test_a_thousand_ranks(tmp_path: Path) -> None:
    report = report_of(tmp_path, world_size=40)
    lines = shown(report)
    assert "  8 of 40 ranks are shown; report.json has all of them" in lines
    at = lines.index("Memory of the processes  MB")
    assert lines[at + 2].split()[0] == "0-39"


def test_json_comes_back_and_follows_the_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    report = report_of(tmp_path)
    text = to_json(report)
    again = from_json(text)
    assert (again.memory, again.startup) == (report.memory, report.startup)
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))
    assert report.memory is not None
    broken = json.loads(text)
    broken["memory"]["ranks"][0]["most"] = "much"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, json.loads(SCHEMA.read_text()))


def test_a_curve_reaches_the_last_step_of_its_rank(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    [attempt] = report.attempts
    longer = replace(attempt, ranks=tuple(replace(rank, steps=120) for rank in attempt.ranks))
    for curve in memory_curves(replace(report, attempts=(longer,))).values():
        assert curve[-1] == (119, curve[-2][1])

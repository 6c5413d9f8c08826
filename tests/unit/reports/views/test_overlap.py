"""The profiled steps on the terminal and in report.json."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.report import render
from tests.helpers.overlap_builder import advice, overlap
from tests.helpers.paths import ROOT


def report(profiled: Overlap | None) -> Report:
    return Report(Verdict.OK, 2, 10, ("torchrun", "train.py"), 0, (), (), (), overlap=profiled)


def shown(profiled: Overlap | None) -> str:
    out = io.StringIO()
    render(report(profiled), Console(file=out, width=80))
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


def test_it_follows_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    complete = report(replace(overlap(), advice=advice(), left_out=("rank 3 left no trace",)))
    jsonschema.validate(json.loads(to_json(complete)), schema)

"""The table of step times in docs/cost.md has a row for each benchmark with a target, and both READMEs quote it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import cost_table
import step_time
from step_job import MODELS

TARGETS = {
    "gpt": (1.01, "wall"),
    "mlp": (1.05, "wall"),
    "tiny-2000": (1.25, "wall"),
    "tiny-1000-one-rank": (1.3, "processor"),
    "tiny-10": (1.15, "processor"),
    "resnet": (1.02, "wall"),
    "large-bf16": (1.03, "wall"),
    "gpt-budget-off": (1.02, "wall"),
    "mlp-budget-off": (1.08, "wall"),
    "tiny-2000-budget-off": (1.5, "wall"),
}
ROWS = [case for case in step_time.CASES if case.title]


def test_targets() -> None:
    assert {case.name: (case.limit, case.measure) for case in ROWS} == TARGETS
    assert all(case.model in MODELS for case in step_time.CASES)


def test_docs_list_every_target_and_readme_quotes_them() -> None:
    docs = cost_table.read(cost_table.DOCS)
    assert list(docs) == [case.title for case in ROWS]
    for case in ROWS:
        assert docs[case.title][1] == step_time.table_row(case, None)[1]
    for page in cost_table.QUOTING:
        quoted = cost_table.read(page)
        assert list(quoted) == [case.title for case in ROWS if "--budget off" not in case.title]
        assert all(row == docs[title] for title, row in quoted.items())


def test_only_rows_that_were_measured_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"DOCS": tmp_path / "DOCS", "README": tmp_path / "README"}
    for path, original in zip(pages.values(), (cost_table.DOCS, cost_table.QUOTING[0]), strict=True):
        path.write_text(original.read_text())
    monkeypatch.setattr(step_time, "DOCS", pages["DOCS"])
    monkeypatch.setattr(step_time, "QUOTING", (pages["README"],))
    before = cost_table.read(pages["DOCS"])
    step_time.write_docs({"mlp": {"wall": 1.0416, "processor": 1.2}})
    title = next(case.title for case in ROWS if case.name == "mlp")
    expected = {**before, title: [title, "1.05 wall", "1.042", "1.200"]}
    assert cost_table.read(pages["DOCS"]) == expected
    assert cost_table.read(pages["README"])[title] == expected[title]
    # Text around the table stays.
    assert (
        pages["DOCS"].read_text().partition("## Measurements")[0]
        == (cost_table.DOCS.read_text().partition("## Measurements")[0])
    )


@pytest.mark.parametrize(("wall", "met"), [(1.01, True), (1.011, False)])
def test_a_case_above_its_target_fails(wall: float, met: bool) -> None:
    medians = {"wall": wall, "processor": 5.0}
    assert step_time.meets_limit(ROWS[0], medians) is met

"""The cost of ddpcheck in reports: lines, tables, the verdict and the live view."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ddpcheck.analysis.live.tracker import LiveTracker
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.kinds.timing import CostRecord
from ddpcheck.reports.ci.markdown import to_markdown
from ddpcheck.reports.html.page import to_html
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.live import cost_text
from ddpcheck.reports.terminal.report import Detail, render
from ddpcheck.reports.verdict import verdict_sentence
from ddpcheck.reports.views.cost import cost_lines, cost_table, schedule_table, share_text
from tests.helpers.run_builder import RunBuilder

SPENT = {"gradients": 9_600, "parameters": 3_200}


def build(folder: Path, *records: CostRecord, world_size: int = 2) -> RunBuilder:
    run = RunBuilder(folder, world_size).wrap().optimizer().train(2)
    run.description["config"] = {"budget": "2"}
    for rank in run.ranks:
        for record in records:
            run.add(rank, record)
    return run.end()


def full(step: int = 0, **fields: int) -> CostRecord:
    return CostRecord(step, 64, 1_612_800, SPENT, **fields)


def on_terminal(report: Report) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    render(report, console, detail=Detail.ALL)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_without_records_of_cost_shows_nothing(tmp_path: Path) -> None:
    report = build(tmp_path).report()
    assert (cost_lines(report), cost_table(report), schedule_table(report)) == ([], None, None)
    assert "ddpcheck took" not in on_terminal(report) + to_markdown(report)
    assert 'id="cost"' not in to_html(report)
    assert verdict_sentence(report).endswith("3 parameters compared after every step")


def test_a_short_run_has_no_share(tmp_path: Path) -> None:
    report = build(tmp_path, CostRecord(1, 10, 20_000, {"gradients": 12_000})).report()
    [line] = cost_lines(report)
    assert line.startswith("ddpcheck took 1.2 ms per step")
    assert "%" not in line


def test_the_line(tmp_path: Path) -> None:
    report = build(tmp_path, full()).report()
    assert cost_lines(report) == ["ddpcheck took 200 us per step (0.8 %), mostly gradients"]
    assert schedule_table(report) is None
    for text in (on_terminal(report), to_markdown(report), to_html(report)):
        assert "ddpcheck took 200 us per step (0.8 %), mostly gradients" in text


def test_two_probes_and_the_highest_rank(tmp_path: Path) -> None:
    run = build(tmp_path, CostRecord(0, 64, 1_600_000, {"a": 4000, "b": 3900, "c": 3000}))
    run.records[1].insert(-1, CostRecord(64, 64, 1_600_000, {"a": 200_000}))
    (line,) = cost_lines(run.report())
    assert "; the most on rank 1: " in line


def test_two_probes_are_named_if_none_takes_half(tmp_path: Path) -> None:
    report = build(tmp_path, CostRecord(0, 64, 1_600_000, {"a": 4000, "b": 3900, "c": 3000})).report()
    assert cost_lines(report)[0].endswith("mostly a and b")


def test_what_the_budget_left_out(tmp_path: Path) -> None:
    report = build(tmp_path, full(), full(64, sketch_every=4)).report()
    assert cost_lines(report)[1:] == [
        "AllReduce verified at every 4th step since step 64 to stay below --budget 2 %"
    ]
    assert verdict_sentence(report).endswith(
        "3 parameters compared after every step, AllReduce at fewer steps"
    )
    table = schedule_table(report)
    assert table is not None
    assert [cell.text for cell in table.rows[1].cells] == [
        "64 to 127", "every 4th step", "every step", "every step", "200 us", "0.8 %"
    ]  # fmt: skip


def test_the_whole_ladder(tmp_path: Path) -> None:
    report = build(
        tmp_path,
        full(),
        full(64, sketch_every=2),
        full(128, sketch_every=64, applied_every=2),
        full(192, sketch_every=64, applied_every=64, params_every=16),
    ).report()
    assert cost_lines(report)[1:] == [
        "AllReduce verified at every 2nd to 64th step since step 64 to stay below --budget 2 %",
        "Applied gradients compared at every 2nd to 64th step since step 128 to stay below --budget 2 %",
        "Parameters compared at every 16th step since step 192 to stay below --budget 2 %",
    ]
    assert "3 parameters compared at every 16th step since step 192, AllReduce" in verdict_sentence(report)


def test_after_a_mismatch_everything_is_checked_again(tmp_path: Path) -> None:
    report = build(tmp_path, full(), full(64, sketch_every=4), full(128)).report()
    assert "at every 4th step from step 64 to 127" in cost_lines(report)[1]


def test_coverage_says_what_was_left_out(tmp_path: Path) -> None:
    text = on_terminal(build(tmp_path, full(), full(64, params_every=16)).report())
    assert "60 steps left out (--budget)" in text


def test_it_is_read_back_from_json(tmp_path: Path) -> None:
    report = build(tmp_path, full(), full(64, sketch_every=4)).report()
    assert from_json(to_json(report)).cost == report.cost


def test_names_of_probes_are_not_trusted(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\x1b[31m|" + "x" * 500
    report = build(tmp_path, CostRecord(0, 64, 1_600_000, {name: 9_600})).report()
    assert "<script>alert" not in to_html(report)
    for text in (on_terminal(report), to_markdown(report)):
        assert "\x1b" not in text
        assert "x" * 100 not in text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-6, "below 0.01 %"),
        (0.0005, "0.05 %"),
        (0.008, "0.8 %"),
        (0.5, "50 %"),
        (1.5, "150 %"),
    ],
)
def test_shares(share: float, text: str) -> None:
    assert share_text(share) == text


def test_the_live_view(tmp_path: Path) -> None:
    def shown(run: RunBuilder) -> str:
        reader = RunReader(run.save())
        reader.poll()
        return cost_text(LiveTracker(reader, "train", 0.0).state(1.0))

    assert shown(build(tmp_path / "old")) == ""
    assert shown(build(tmp_path / "new", full())) == "ddpcheck 0.8 %"
    assert shown(build(tmp_path / "empty", CostRecord(0, 0, 0))) == ""


def test_the_share_under_the_last_schedule(tmp_path: Path) -> None:
    thinned = CostRecord(64, 64, 1_606_400, {"gradients": 6_400}, sketch_every=4)
    (line, _) = cost_lines(build(tmp_path, full(), thinned).report())
    assert line == "ddpcheck took 150 us per step (0.6 %; 0.4 % since step 64), mostly gradients"

"""Views: built once, so that the terminal and the page show the same numbers."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from ddpcheck.analysis.report import DataEpoch, Report
from ddpcheck.reports.html.page import to_html
from ddpcheck.reports.terminal.report import Detail, render
from ddpcheck.reports.views import data, hardware, memory, ranks, timing
from ddpcheck.reports.views.table import Column, Row, Table, heaviest, left_out, row
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import stored, with_parts

VIEWS: dict[str, Callable[[Report], Table | None]] = {
    "ranks": lambda report: ranks.rank_tables(report)[0],
    "data": data.data_table,
    "traffic": hardware.traffic_table,
    "links": hardware.link_table,
    "ports": hardware.port_table,
    "nodes": hardware.node_table,
    "gpus": hardware.gpu_table,
    "step time": lambda report: timing.step_times(report)[0].table,
    "start-up": timing.startup_table,
    "memory": memory.memory_table,
    "overlap": lambda report: getattr(timing.profiled_overlap(report), "ranks", None),
    "checks": ranks.check_table,
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def report() -> Report:
    epochs = [
        DataEpoch("0", 0, number, 10 * number, 1000, 2, {"0": 500, "1": 501}, 1, 0, 1) for number in range(2)
    ]
    return replace(with_parts(stored("1-learning-rate"), measurements(4)), data=tuple(epochs))


@pytest.fixture(scope="module")
def terminal(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    render(report, console, detail=Detail.ALL)
    assert isinstance(console.file, io.StringIO)
    return words(console.file.getvalue())


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return words(html.unescape(re.sub(r"<[^>]+>", " ", to_html(report))))


@pytest.mark.parametrize("name", VIEWS)
def test_terminal_and_page_show_every_row_of_a_view(
    name: str, report: Report, terminal: str, page: str
) -> None:
    table = VIEWS[name](report)
    assert table is not None
    assert table.rows
    for each in table.rows:
        short = [
            cell.plain for cell, column in zip(each.cells, table.columns, strict=True) if not column.detail
        ]
        assert words(" ".join(short)) in terminal
        assert words(" ".join(cell.plain for cell in each.cells)) in page


@pytest.mark.parametrize("name", VIEWS)
def test_a_report_without_measurements_has_no_empty_tables(name: str) -> None:
    empty = with_parts(
        stored("1-sound"),
        {"hardware": {}, "traffic": {}, "links": {}, "time": [], "memory": None, "startup": None, "data": []},
    )
    if name != "step time":
        table = VIEWS[name](empty)
        assert table is None or table.rows
    else:
        assert timing.step_times(empty) == []


def test_the_heaviest_rows_are_shown_in_order() -> None:
    rows: list[Row] = [row([number], weight=abs(number - 5)) for number in range(11)]
    assert [each.cells[0].text for each in heaviest(rows, 4)] == ["0", "1", "9", "10"]
    assert heaviest(rows, 11) == rows


def test_rows_that_are_not_shown_are_counted() -> None:
    table = Table("T", (Column("rank"),), (row([0]), row([None])), noun="ranks", total=40)
    assert table.rows[1].cells[0].text == "-"
    assert left_out(table, 2) == "2 of 40 ranks are shown; report.json has all of them"
    assert left_out(table, 40) == ""

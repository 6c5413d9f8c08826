"""Sparklines: values as bars, and the series of a job on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timeseries.model import GradientHistory
from ddpcheck.reports.terminal.charts import print_series, sparkline
from ddpcheck.reports.terminal.console import ReportConsole
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import stored, with_parts


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇▇"),
        ([0, 0, 8], "▁▁▇"),
        # From zero: half of the most is half as high.
        ([4, 8], "▄▇"),
        # Close values: the differences are visible. Closer: a flat line.
        ([100, 110], "▂▇"),
        ([100, 101, 100], "▄▄▄"),
        ([5, 5, 5], "▄▄▄"),
        ([0, 0], "▁▁"),
        ([1, None, float("nan"), 2], "▄  ▇"),
        ([], ""),
        ([None, None], ""),
        ([-1, 1], "▂▇"),
    ],
)
def test_values_become_bars(values: list[float | None], drawn: str) -> None:
    assert sparkline(values, 20) == drawn


def test_many_values_show_the_maximum_of_each_bar() -> None:
    values = [1.0] * 100
    values[57] = 9.0
    line = sparkline(values, 10)
    assert len(line) == 10
    assert line == "▁▁▁▁▁▇▁▁▁▁"


def test_ascii() -> None:
    line = sparkline([1, 2, 3, 8], 8, ascii_only=True)
    assert line.isascii()
    assert line[-1] == "#"


def drawn(report: Report, width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_series(ReportConsole(Console(file=file, width=width)), report)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined, no-any-return]


def report_of(ranks: int = 4, **more: Any) -> Report:
    sound = with_parts(stored("1-sound"), {"time": measurements(ranks)["time"]})
    [table] = sound.time
    course = tuple(10_000 + 500 * (step % 3) for step in range(40))
    rows = [replace(row, course_us=course) for row in table.ranks]
    rows[2] = replace(rows[2], course_us=(*course[:20], 40_000, *course[21:]))
    return replace(sound, time=(replace(table, ranks=tuple(rows)),), **more)


def bars(line: str) -> str:
    return "".join(character for character in line if "▁" <= character <= "█")


def test_step_times_of_all_ranks_share_a_scale() -> None:
    rows = drawn(report_of())
    assert rows[1] == "Over the steps  each bar is the maximum over its steps"
    lines = [row for row in rows if "rank" in row]
    assert [row.split("rank ")[1][0] for row in lines] == ["0", "1", "2", "3"]
    assert bars(lines[2]).count("▇") == 1
    assert "▇" not in bars(lines[0])
    assert lines[2].split()[-4:] == ["10.0", "ms", "40.0", "ms"]
    assert max(map(len, rows)) <= 80


def test_of_many_ranks_those_with_the_longest_steps() -> None:
    lines = [row for row in drawn(report_of(64)) if "rank" in row]
    assert len(lines) == 4
    assert any("rank 2 " in row for row in lines)


def test_gradients_have_gaps_where_nothing_is_known() -> None:
    history = GradientHistory("0", "Net", 1, (0, 1, 2, 3), {}, (4.0, None, 2.0, 1.0), (None,) * 4)
    [row] = [line for line in drawn(report_of(gradients=(history,))) if "gradient norm" in line]
    assert "▇ ▄▂" in row
    assert row.split()[-2:] == ["1", "4"]


def test_memory_is_drawn_over_steps_and_not_over_records() -> None:
    row = {**measurements()["memory"]["ranks"][0], "rank": 0, "most": 400}
    # Recorded at the first steps and when it has doubled, half-way.
    row["curve"] = [[0, 200], [1, 200], [2, 200], [500, 400], [1000, 400]]
    [line] = [text for text in drawn(report_of(memory={"ranks": [row]})) if "memory" in text]
    line = bars(line)
    assert abs(line.count("▇") - len(line) / 2) <= 1


def test_a_job_without_series_has_no_table() -> None:
    assert drawn(replace(stored("1-sound"), time=(), gradients=(), memory=None)) == []


def test_ascii_and_wide_and_narrow() -> None:
    assert all(row.isascii() for row in drawn(report_of(), encoding="ascii"))
    for width in (60, 80, 120, 200):
        rows = drawn(report_of(), width)
        assert len(rows) == 7
        assert max(map(len, rows)) <= width

"""What is said below the table of time where page faults take a good part of the step."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ddpcheck.reports.terminal.report import render
from tests.helpers.sample_measurements import measurements
from tests.helpers.sample_reports import stored, with_parts


def rendered(refaults: dict[str, Any] | None) -> str:
    table = {**measurements(ranks=2, late=1)["time"][0], "refaults": refaults}
    console = Console(file=io.StringIO(), width=80)
    render(with_parts(stored("1-learning-rate"), {"time": [table]}), console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_page_faults_that_take_much_of_the_step() -> None:
    text = rendered({"rank": 1, "faults": 2_500, "share": 0.5})
    assert "Up to 2,500 page faults per step, 50 % of the step in the kernel" in text
    assert "MALLOC_TRIM_THRESHOLD_" in text


def test_nothing_is_said_where_they_do_not() -> None:
    assert "page faults" not in rendered(None)

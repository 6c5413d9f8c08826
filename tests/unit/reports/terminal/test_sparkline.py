"""Lines of text that show figures over steps."""

from __future__ import annotations

import pytest

from ddpcheck.reports.terminal.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇▇"),
        ([0, 0, 8], "▁▁▇"),
        # From zero: half of the most is half as high.
        ([4, 8], "▄▇"),
        # Close together: still something to see. Closer: nothing worth it.
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


def test_many_values_show_the_largest_of_each_place() -> None:
    values = [1.0] * 100
    values[57] = 9.0
    line = sparkline(values, 10)
    assert len(line) == 10
    assert line == "▁▁▁▁▁▇▁▁▁▁"


def test_ascii() -> None:
    line = sparkline([1, 2, 3, 8], 8, ascii_only=True)
    assert line.isascii()
    assert line[-1] == "#"

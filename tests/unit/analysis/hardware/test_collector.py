"""When ranks took their steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.analysis.hardware.collector import MOST_POINTS, StepTimeline, StepTimes

MODULE = ((0, 1), 0)


def line_of(times: list[float]) -> StepTimeline:
    line = StepTimeline()
    for step, time in enumerate(times):
        line.add(step, time)
    return line


def test_steps_at_a_time() -> None:
    line = line_of([10.0, 11.0, 13.0])
    assert (line.steps, line.began, line.ended) == (3, 10.0, 13.0)
    assert [line.at(time) for time in (9.0, 10.0, 10.5, 11.0, 12.0, 13.0, 20.0)] == [0, 0, 0.5, 1, 1.5, 2, 2]


@settings(max_examples=25)
@given(st.integers(2, 6 * MOST_POINTS))
def test_a_long_series_keeps_its_ends_and_its_stride(count: int) -> None:
    line = line_of([100.0 + step / 10 for step in range(count)])
    assert len(line._steps) <= MOST_POINTS + 1
    assert (line.steps, line.began) == (count, 100.0)
    assert line.ended == pytest.approx(100.0 + (count - 1) / 10)
    middle = (count - 1) / 2
    assert line.at(100.0 + middle / 10) == pytest.approx(middle, abs=0.01)


def test_time_that_goes_back_is_ignored() -> None:
    line = line_of([10.0, 9.0, 12.0])
    assert (line.steps, line.at(11.0)) == (3, 1.0)


def test_the_window_is_where_all_ranks_step() -> None:
    times = StepTimes()
    assert times.window() is None
    for step in range(5):
        times.step(0, (MODULE, 0), step, 10.0 + step)
        times.step(1, (MODULE, 0), step, 10.5 + step)
    assert times.window() == (10.5, 14.0)
    assert times.of(7) is None


def test_of_several_optimizers_the_busiest_counts() -> None:
    times = StepTimes()
    for step in range(6):
        times.step(0, (MODULE, 0), step, 10.0 + step)
        if step % 3 == 0:
            times.step(0, (MODULE, 1), step // 3, 10.1 + step)
    line = times.of(0)
    assert line is not None
    assert line.steps == 6


def test_thousands_of_ranks_share_the_limit() -> None:
    times = StepTimes()
    for rank in range(2000):
        times.step(rank, (MODULE, 0), 0, 1.0)
    for step in range(1, 2000):
        times.step(1999, (MODULE, 0), step, 1.0 + step)
    line = times.of(1999)
    assert line is not None
    assert len(line._steps) <= 17
    assert line.at(1000.0) == pytest.approx(999.0)


def test_reductions() -> None:
    times = StepTimes()
    assert times.reductions(MODULE) is None
    times.reduced(MODULE, 4)
    times.reduced(MODULE, 3)
    assert times.reductions(MODULE) == 4

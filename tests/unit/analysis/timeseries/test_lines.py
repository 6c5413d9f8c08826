"""Agreement and gradient histories, and series over the steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ddpcheck.analysis.allreduce.mean_check import SketchTable
from ddpcheck.analysis.timeseries.collector import (
    MAX_NORM_POINTS,
    MOST_INTERVALS,
    OFF_MEAN,
    REDUCED,
    AgreementSeries,
    GradientSeries,
)
from ddpcheck.analysis.timeseries.model import AgreementInterval
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import pack
from tests.helpers.run_builder import RunBuilder

GROUP = (0, 1, 2)


def table(**norms: list[float]) -> SketchTable:
    """By rank, the norms of its gradients."""
    return SketchTable(
        {
            int(rank.removeprefix("rank_")): pack(
                Sketch(0.0, each, int(math.isnan(each)), 1) for each in values
            )
            for rank, values in norms.items()
        }
    )


def test_steps_with_the_same_outliers_are_one_interval() -> None:
    series = AgreementSeries()
    for step in (-1, 0, 1, 2):
        series.note(step, GROUP, dict.fromkeys(GROUP, "a"))
    series.note(3, GROUP, {0: "a", 1: "a", 2: "b"})
    series.note(4, GROUP, {0: "c", 1: "c", 2: "d"})
    series.note(5, GROUP, {0: "c", 1: "d"})
    assert series.intervals == [
        AgreementInterval(-1, -1, 1),
        AgreementInterval(0, 2, 3),
        AgreementInterval(3, 4, 2, odd=(2,)),
        AgreementInterval(5, 5, 1, odd=(0, 1), absent=(2,), majority=False),
    ]


def test_steps_between_comparisons_are_not_counted() -> None:
    series = AgreementSeries()
    for step in (0, 10, 20):
        series.note(step, GROUP, dict.fromkeys(GROUP, "a"))
    assert series.intervals == [AgreementInterval(0, 20, 3)]


def test_intervals_are_bounded_if_outliers_change_at_every_step() -> None:
    series = AgreementSeries()
    for step in range(MOST_INTERVALS + 500):
        series.note(step, GROUP, {0: "a", 1: "a", 2: "ab"[step % 2]})
    assert len(series.intervals) == MOST_INTERVALS
    assert series.cut


def test_gradients_of_a_long_job_keep_their_peaks() -> None:
    series = GradientSeries(ranks=2)
    for step in range(5000):
        norm = 100.0 if step == 3333 else 1.0
        series.note(step, table(rank_0=[norm], rank_1=[3.0, 4.0]), table(rank_0=[2.0]), 0.25)
    assert len(series.points) <= MAX_NORM_POINTS
    assert series.every == 8
    # Norms are stored in half octaves.
    expected = {0: 100.0, 1: 5.0, REDUCED: 2.0, OFF_MEAN: 0.25}
    assert series.points[3333 // 8] == pytest.approx(expected, rel=0.2)
    assert series.points[0][0] == pytest.approx(1.0, rel=0.2)


def test_non_finite_values_have_no_norm() -> None:
    series = GradientSeries(ranks=1)
    series.note(0, table(rank_0=[1.0, math.nan]), None, math.inf)
    assert series.points == {0: {}}


def test_many_ranks_share_the_limit() -> None:
    assert GradientSeries(ranks=1024).limit < GradientSeries(ranks=64).limit < GradientSeries(ranks=4).limit


def test_a_run_shows_which_ranks_diverged_and_when(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", 3).wrap().train(4)
    report = builder.train(2, first=4, outliers={1: ["body.bias"]}).end().report()
    [history] = report.agreement
    assert (history.module, history.name, history.ranks) == ("0", "Net", GROUP)
    assert history.stretches == (
        AgreementInterval(-1, -1, 1),
        AgreementInterval(0, 3, 4),
        AgreementInterval(4, 5, 2, odd=(1,)),
    )


def test_a_run_shows_its_gradients(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", 2).wrap()
    for number in (1, 2):
        builder.backward(number, {0: [3.0, 0.0, 4.0], 1: [1.0, 0.0, 0.0]}, [2.0, 0.0, 2.0])
        builder.step(number - 1)
    [history] = builder.end().report().gradients
    assert history.steps == (0, 1)
    # Norms are stored in half octaves.
    assert history.local["0"] == pytest.approx((5.0, 5.0), rel=0.2)
    assert history.local["1"] == pytest.approx((1.0, 1.0), rel=0.2)
    assert history.reduced == pytest.approx((math.sqrt(8),) * 2, rel=0.2)
    assert all(value is not None and value <= 1 for value in history.off_mean)


def test_ranks_are_grouped_by_environment(tmp_path: Path) -> None:
    rows = {row.name: row.values for row in RunBuilder(tmp_path / "run", 2).wrap().end().report().environment}
    assert [(one.value, one.ranks) for one in rows["torch"]] == [("2.13.0", (0, 1))]
    assert "RANK" not in rows

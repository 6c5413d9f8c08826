"""Two runs side by side in speed: differences, noise, and the exit status for CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from ddpcheck.diff.speed import SpeedOutcome, compare_speed, measured, regressions
from tests.helpers.run_builder import RunBuilder
from tests.unit.analysis.timing.test_table import add_clocks, clocks


def stored(folder: Path, steps: int = 200, **more: int) -> Path:
    """A run of two ranks with noise in every phase; `more` is added to phases, in microseconds."""
    series = clocks(2, steps, more=lambda rank, step: more, noise=2_000)
    return add_clocks(RunBuilder(folder, 2).wrap().train(4), series).end().save()


def status(*arguments: object) -> object:
    with pytest.raises(SystemExit) as leaving:
        main(["diff", *map(str, arguments)])
    return leaving.value.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "first": stored(folder / "first"),
        "again": stored(folder / "again", forward=30),
        "slower": stored(folder / "slower", data=10_000),
        "short": stored(folder / "short", steps=20),
    }


def outcomes(a: Path, b: Path) -> dict[str, SpeedOutcome]:
    return {figure.what: figure.outcome for figure in compare_speed(a, b)}


def test_a_phase_that_takes_longer_and_nothing_else(runs: dict[str, Path]) -> None:
    found = outcomes(runs["first"], runs["slower"])
    assert {name for name, outcome in found.items() if outcome is SpeedOutcome.WORSE} == {"step time", "data"}
    back = outcomes(runs["slower"], runs["first"])
    assert {name for name, outcome in back.items() if outcome is SpeedOutcome.BETTER} == {"step time", "data"}


def test_noise_is_no_difference(runs: dict[str, Path]) -> None:
    found = outcomes(runs["first"], runs["again"])
    assert found
    assert set(found.values()) == {SpeedOutcome.NOISE}


def test_the_range_of_a_series_that_drifts_covers_both_ends() -> None:
    drifting = measured([100.0 + step for step in range(80)])
    assert (drifting.value, drifting.low, drifting.high) == (139.5, 104.5, 174.5)


def test_ci_fails_by_the_percentage_alone(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(runs["first"], runs["slower"], "--fail-on-regression", 5) == 10
    assert "Worse by more than 5 %: step time" in capsys.readouterr().out
    assert status(runs["first"], runs["slower"], "--fail-on-regression", 50) == 0
    assert status(runs["slower"], runs["first"], "--fail-on-regression", 5) == 0
    assert status(runs["first"], runs["slower"]) == 0


def test_too_few_steps_do_not_pass(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert regressions(compare_speed(runs["first"], runs["short"]), 5) is None
    assert status(runs["first"], runs["short"], "--fail-on-regression", 5) == 2
    assert "32 measured steps" in capsys.readouterr().err


def test_json_has_every_quantity(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(runs["first"], runs["slower"], "--json") == 0
    rows = json.loads(capsys.readouterr().out)["speed"]
    step = next(row for row in rows if row["what"] == "step time")
    assert (step["unit"], step["outcome"]) == ("us", "worse")
    assert step["b"]["value"] - step["a"]["value"] == pytest.approx(10_000, rel=0.2)

"""A run in blocks gives the same report as the same records one by one, whatever happens in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.aggregate import step_window
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.step_window import Window
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.registry import Record
from ddpcheck.reports.json_report import to_json
from tests.helpers.block_runs import in_blocks
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder
from tests.scale.generate import STORED_SEED, make_run
from tests.scale.plan import Plan

STORED = sorted((ROOT / "tests" / "stored_runs").glob("1-*"))


def report_of(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(to_json(analyse_run(path, course=True)))
    del report["run"]
    return report


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Sums of floats may differ in their last bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), (where, one, other)
        for index, value in enumerate(one):
            assert_equal(value, other[index], f"{where}[{index}]")
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300), where
    else:
        assert one == other, where


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many steps were passed in windows, and how many records one by one."""
    counts = {"steps": 0, "records": 0}
    feed_window, feed = Attempt.take_window, Attempt.take_record

    def count_window(self: Attempt, window: Window) -> None:
        counts["steps"] += window.end - window.first
        feed_window(self, window)

    def count_record(self: Attempt, rank: Any, record: Record) -> None:
        counts["records"] += 1
        feed(self, rank, record)

    monkeypatch.setattr(Attempt, "take_window", count_window)
    monkeypatch.setattr(Attempt, "take_record", count_record)
    return counts


@pytest.mark.parametrize("most", [1, 7, 60])
@pytest.mark.parametrize("run", STORED, ids=lambda path: path.name)
def test_stored_runs(run: Path, most: int, tmp_path: Path) -> None:
    assert_equal(report_of(run), report_of(in_blocks(run, tmp_path / "run", most)))


BROKEN = Plan(ranks=20, steps=120, epoch=50, outlier_rank=13, outlier_step=60, slow_node=1)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broken") / "run"
    make_run(path, STORED_SEED, BROKEN)
    return path


@pytest.mark.parametrize("most", [5, 40, 300])
def test_a_run_with_a_divergence_and_a_slow_node(
    broken: Path, most: int, tmp_path: Path, passed: dict[str, int]
) -> None:
    expected = report_of(broken)
    singly = passed["records"]
    assert passed["steps"] == 0
    passed["records"] = 0
    assert_equal(expected, report_of(in_blocks(broken, tmp_path / "run", most)))
    # All but the last step, and those with an event, such as the end of an epoch.
    assert passed["steps"] > 0.9 * BROKEN.steps
    assert passed["records"] < singly / 2


Build = Callable[[RunBuilder], RunBuilder]


def trained(**options: Any) -> Build:
    return lambda builder: builder.wrap().optimizer().train(40, **options).end()


def reunited(builder: RunBuilder) -> RunBuilder:
    builder.wrap().optimizer().train(20)
    builder.train(3, 20, outliers={1: ["body.bias"]}).train(20, 23)
    return builder.train(12, 43, outliers={1: ["body.bias"]}).train(15, 55).end()


def another_outlier(builder: RunBuilder) -> RunBuilder:
    builder.wrap().optimizer().train(20, outliers={2: ["head.weight"]})
    builder.train(20, 20, outliers={0: ["head.weight"]})
    return builder.train(20, 40, outliers={2: ["head.weight"]}).end()


def one_rank_dies(builder: RunBuilder) -> RunBuilder:
    builder.wrap().optimizer().train(30)
    del builder.records[1][-40:]
    return builder.end(ranks=[0, 2, 3])


def skipped_forwards(builder: RunBuilder) -> RunBuilder:
    """Forwards have the numbers of their steps at first, and not after some that no step followed."""
    builder.wrap().optimizer()
    for step in range(40):
        forward = step if step < 17 else step + 2
        for rank in range(4):
            digest = f"{rank:04x}{step:08x}"
            builder.add(rank, BatchRecord(forward, 0, None if forward == step else step, digest, rows=4))
        builder.step(step)
    return builder.end()


def later_on_another_rank(builder: RunBuilder) -> RunBuilder:
    """Rank 3 has the batches of rank 2, two forwards later."""
    builder.wrap().optimizer()
    for step in range(40):
        for rank in range(4):
            number = f"{2:04x}{step - 2:08x}" if rank == 3 and step > 1 else f"{rank:04x}{step:08x}"
            builder.add(rank, BatchRecord(step, 0, None, number, rows=4))
        builder.step(step)
    return builder.end()


BUILDS: dict[str, Build] = {
    "sound": trained(),
    "one outlier": trained(outliers={2: ["body.bias"]}),
    "no majority": trained(outliers={0: ["body.bias"], 1: ["body.bias"], 2: ["head.weight"]}),
    "reunited": reunited,
    "another outlier": another_outlier,
    "a rank dies": one_rank_dies,
    "skipped forwards": skipped_forwards,
    "later on another rank": later_on_another_rank,
}


@pytest.mark.parametrize("most", [3, 30, 500])
@pytest.mark.parametrize("name", BUILDS)
def test_built_runs(name: str, most: int, tmp_path: Path) -> None:
    lines = BUILDS[name](RunBuilder(tmp_path / "lines", 4)).save()
    for seed in range(3):
        blocks = in_blocks(lines, tmp_path / f"blocks-{seed}", most, seed)
        assert_equal(report_of(lines), report_of(blocks))


def polled(path: Path, patience: float) -> Attempt:
    run = RunReader(path, patience=patience)
    run.poll()
    (attempt,) = run.attempts.values()
    return attempt


def test_a_job_that_has_ended_is_known_completely_after_one_poll(tmp_path: Path) -> None:
    lines = trained()(RunBuilder(tmp_path / "lines", 3)).save()
    attempt = polled(in_blocks(lines, tmp_path / "blocks", 50), patience=1000.0)
    assert all(rank.end is not None for rank in attempt.ranks.values())
    assert {attempt.steps(rank) for rank in range(3)} == {40}


@pytest.mark.parametrize(("patience", "differ"), [(1000.0, False), (0.0, True)])
def test_the_last_step_of_a_running_job(patience: float, differ: bool, tmp_path: Path) -> None:
    """It may be incomplete, and waits; a job that is stopped at once must not wait."""
    builder = RunBuilder(tmp_path / "lines", 3).wrap().optimizer().train(20)
    lines = builder.train(1, 20, outliers={1: ["body.bias"]}).save()
    attempt = polled(in_blocks(lines, tmp_path / "blocks", 50), patience)
    (module,) = attempt.modules()
    stats = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS)
    assert stats.compared == 20 + differ
    assert {attempt.steps_read(rank) for rank in range(3)} == {21}


def test_ranks_that_wait_for_one_that_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded: a rank may be gone without a last record."""
    monkeypatch.setattr(step_window, "_MOST_WAITING", 64)
    lines = one_rank_dies(RunBuilder(tmp_path / "lines", 4)).save()
    attempt = polled(in_blocks(lines, tmp_path / "blocks", 10), patience=1000.0)
    assert attempt._buffer._waiting <= 64
    assert_equal(report_of(lines), report_of(tmp_path / "blocks"))

"""DDP101: parameters or buffers differ after wrapping."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import Stage, TensorKind
from tests.helpers.run_builder import RunBuilder


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
def test_parameters_that_differ_after_wrapping(
    tmp_path: Path, world_size: int, outliers: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(outliers={1: ["head.weight"]}, options={"init_sync": False})
    finding = build.train(2, outliers={1: ["head.weight"]}).end().only("DDP101")
    assert (finding.ranks, finding.parameter, finding.step) == (outliers, "head.weight", None)
    assert finding.stage == "init.after"
    assert "init_sync=False" in finding.cause
    assert "1 of 3 parameters" in finding.message


def test_buffers_that_differ_after_wrapping(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(
        buffers=["norm.mean", "norm.var"],
        buffer_outliers={2: ["norm.var"]},
        options={"broadcast_buffers": False},
    )
    finding = build.train(2).end().only("DDP101")
    assert (finding.ranks, finding.parameter) == ((2,), "norm.var")
    assert "broadcast_buffers=False" in finding.cause
    assert "1 of 2 buffers" in finding.message


def test_without_an_option_that_explains_it(tmp_path: Path) -> None:
    finding = RunBuilder(tmp_path, 4).wrap(outliers={0: ["body.bias"]}).end().only("DDP101")
    assert finding.cause == "the broadcast at wrapping did not make the ranks equal"


def test_equal_after_wrapping(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=["norm.mean"], outliers_before={1: ["body.bias"]}).train(2)
    assert build.end().findings("DDP101") == []


def test_differing_names_are_not_reported_here(tmp_path: Path) -> None:
    other = ["head.weight", "body.weight", "body.bias"]
    build = RunBuilder(tmp_path, 2).wrap(names_on={1: other}, outliers={1: ["body.bias"]}).end()
    assert build.findings("DDP101") == []


def test_buffers_that_differ_only_in_training_are_not_reported(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=["norm.mean"])
    build.snapshot(Stage.BUFFERS, 0, ["norm.mean"], of=TensorKind.BUFFERS, outliers={1: ["norm.mean"]})
    assert build.end().findings("DDP101") == []


ADAPTER = ("adapter.down", "adapter.up")


def with_adapter(folder: Path, world_size: int, outliers: dict[int, list[str]]) -> RunBuilder:
    """DDP ignores an adapter that differs across ranks."""
    build = RunBuilder(folder, world_size).wrap(ignored=ADAPTER).optimizer()
    return build.snapshot(Stage.INIT_AFTER, -1, ADAPTER, of=TensorKind.IGNORED, outliers=outliers, width=8)


def apply_to_adapter(
    build: RunBuilder, step: int, outliers: dict[int, list[str]] | None = None
) -> RunBuilder:
    return build.snapshot(
        Stage.APPLIED, step, ADAPTER, of=TensorKind.IGNORED, outliers=outliers, width=8, optimizer=0
    ).step(step)


@pytest.mark.parametrize(("world_size", "ranks"), [(2, (0, 1)), (3, (1,))])
def test_ignored_and_meant_to_be_equal(tmp_path: Path, world_size: int, ranks: tuple[int, ...]) -> None:
    build = with_adapter(tmp_path, world_size, {1: ["adapter.up"]})
    finding = apply_to_adapter(apply_to_adapter(build, 1), 2).end().only("DDP101")
    assert (finding.parameter, finding.ranks, finding.stage) == ("adapter.up", ranks, "init.after")
    assert finding.evidence["steps_with_equal_gradients"] == 2
    assert "configured to ignore" in finding.cause


def test_ignored_and_trained_by_each_rank_for_itself(tmp_path: Path) -> None:
    build = with_adapter(tmp_path, 2, {1: ["adapter.up"]})
    build = apply_to_adapter(apply_to_adapter(build, 1), 2, {1: ["adapter.down"]})
    assert build.end().findings() == []


def test_ignored_and_not_trained(tmp_path: Path) -> None:
    assert with_adapter(tmp_path, 2, {1: ["adapter.up"]}).train(3).end().findings() == []


def test_ignored_and_equal(tmp_path: Path) -> None:
    assert apply_to_adapter(with_adapter(tmp_path, 2, {}), 1).end().findings() == []


def test_ignored_and_equal_until_each_rank_trains_its_own(tmp_path: Path) -> None:
    """A note of DDP211: nothing shows that they have to stay equal."""
    build = with_adapter(tmp_path, 2, {})
    for step in (1, 2):
        apply_to_adapter(build, step, {1: list(ADAPTER)})
    [finding] = build.end().findings()
    assert (finding.code, finding.severity.value, finding.step) == ("DDP211", "note", 1)
    assert finding.parameter == "adapter.down"


def test_one_of_several_ignored_is_not_reduced(tmp_path: Path) -> None:
    build = with_adapter(tmp_path, 2, {})
    for step in (1, 2):
        apply_to_adapter(build, step, {1: ["adapter.up"]})
    finding = build.end().only("DDP211")
    assert (finding.severity.value, finding.parameter) == ("error", "adapter.up")
    assert "1 other ignored" in finding.cause

"""DDP208: parameters were written outside the optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import Stage
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_rank_loaded_a_checkpoint(tmp_path: Path, world_size: int) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(3).rewrite(3, [1], OUTLIERS)
    finding = build.train(2, first=3, outliers=OUTLIERS).end().only("DDP208")
    assert (finding.step, finding.stage, finding.parameter) == (3, "rewritten", "body.bias")
    assert finding.ranks == ((0, 1) if world_size == 2 else (1,))
    assert finding.evidence["rewritten_on_ranks"] == [1]
    assert "Replicas diverge before step 3" in finding.message
    assert "rank 1 wrote" in finding.message


def test_all_ranks_wrote_and_one_something_else(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, range(4), {2: ["body.bias"]})
    finding = build.step(3, outliers={2: ["body.bias"]}).end().only("DDP208")
    assert (finding.ranks, finding.evidence["rewritten_on_ranks"]) == ((2,), [0, 1, 2, 3])


def test_parameters_that_no_optimizer_steps(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer([[0, 2]]).train(2)
    finding = build.step(2, outliers=OUTLIERS).end().only("DDP208")
    assert (finding.ranks, finding.step) == ((1,), 2)
    assert finding.cause == "no optimizer steps these parameters"


def test_all_ranks_wrote_the_same(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, range(4)).train(2, first=3)
    assert build.end().findings() == []


def test_a_write_that_changed_nothing_explains_nothing(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().train(3).rewrite(3, [1])
    build.step(3, outliers=OUTLIERS).end().only("DDP201")


@pytest.mark.parametrize(
    ("step", "ranks", "cause"),
    [
        (3, [1], "written between two steps, by rank 1 only"),
        (0, [1], "written between wrapping and the first step, by rank 1 only"),
        (3, [0, 1, 2], "written between two steps, on all ranks but differently"),
        (3, [1, 2], "written between two steps, by ranks 1-2 only"),
    ],
)
def test_ranks_that_wrote_and_when(tmp_path: Path, step: int, ranks: list[int], cause: str) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer().train(step).rewrite(step, ranks, OUTLIERS)
    assert build.train(2, first=step, outliers=OUTLIERS).end().only("DDP208").cause == cause


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("inside the forward", "inside the forward"),
        ("between backward and step", "between backward and step"),
        ("before the forward", "between two steps"),
    ],
)
def test_a_later_write_shows_when(tmp_path: Path, how: str, when: str) -> None:
    build = (
        RunBuilder(tmp_path, 2)
        .wrap()
        .optimizer()
        .train(2)
        .rewrite(2, [0, 1], OUTLIERS)
        .step(2, outliers=OUTLIERS)
    )
    build.rewrite(3, [0, 1], OUTLIERS, how=how).step(3, outliers=OUTLIERS)
    assert build.end().only("DDP208").cause == f"written {when}, on all ranks but differently"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("none", " from gradients that DDP did not reduce: no backward() ran before the update"),
        ("wrapper bypassed", " from gradients that DDP did not reduce: wrapper bypassed"),
        ("synced", ""),
        ("", ""),
    ],
)
def test_an_update_without_an_optimizer(tmp_path: Path, how: str, cause: str) -> None:
    build = RunBuilder(tmp_path, 3).wrap()
    for step in range(2):
        build.snapshot(Stage.PARAMS, step, outliers=OUTLIERS if step else None, how=how)
    finding = build.end().only("DDP208")
    assert (finding.ranks, finding.step, finding.stage) == ((1,), 1, "params")
    assert finding.cause == "updated outside optimizer.step()" + cause


def test_an_update_without_an_optimizer_that_is_equal_everywhere(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap()
    build.snapshot(Stage.PARAMS, 0, how="none").snapshot(Stage.PARAMS, 1, how="synced")
    assert build.end().findings() == []

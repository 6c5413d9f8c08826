"""DDP201: parameters diverged, the general case."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.modules import CommHookRecord
from tests.helpers.run_builder import RunBuilder


@pytest.mark.parametrize(
    ("world_size", "outlier_ranks", "outliers"),
    [(2, [1], (0, 1)), (3, [1], (1,)), (4, [0], (0,)), (4, [2, 3], (0, 1, 2, 3))],
)
def test_diverged(
    tmp_path: Path, world_size: int, outlier_ranks: list[int], outliers: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer().train(3)
    diverging = {rank: ["body.bias", "head.weight"] for rank in outlier_ranks}
    finding = build.train(4, first=3, outliers=diverging).end().only("DDP201")
    assert (finding.ranks, finding.step, finding.stage) == (outliers, 3, "params")
    assert finding.parameter == "body.bias"
    assert "Replicas diverge at step 3: 2 of 3 parameters" in finding.message
    assert finding.evidence["parameters"]["names"] == ["body.bias", "head.weight"]


@pytest.mark.parametrize("gradients", [True, False])
def test_the_cause_depends_on_the_gradients(tmp_path: Path, gradients: bool) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer()
    for step in range(3):
        if gradients:
            build.apply(step, last="synced", synced=1, module=0, optimizer=0, moved=False)
        build.step(step, outliers={1: ["body.bias"]} if step == 2 else None)
    finding = build.end().only("DDP201")
    assert ("all applied the same gradients" in finding.cause) is gradients
    assert ("--optimizer-state" in finding.fix) is gradients


def test_equal_to_the_end(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().optimizer().train(5).end().findings("DDP201") == []


def test_a_rank_that_died_is_not_waited_for(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer().train(2)
    build.step(2, ranks=[0, 1], outliers={1: ["body.bias"]})
    (finding,) = build.end([0, 1]).findings("DDP201")
    assert finding.ranks == (0, 1)


def test_ranks_that_agree_again_have_still_diverged(tmp_path: Path) -> None:
    build = (
        RunBuilder(tmp_path, 4)
        .wrap()
        .optimizer()
        .train(2)
        .step(2, outliers={1: ["body.bias"]})
        .train(3, first=3)
    )
    assert build.end().only("DDP201").step == 2


def test_under_post_local_sgd_ranks_may_differ(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    for rank in (0, 1):
        build.add(rank, CommHookRecord(0, "post_localSGD_hook", 0))
    assert build.train(3, outliers={1: ["body.bias"]}).end().findings("DDP201") == []


def test_what_is_known_of_the_steps_before(tmp_path: Path) -> None:
    """Parameters were equal when they were read, which is not directly before the step."""
    build = RunBuilder(tmp_path / "a", 2).wrap().optimizer().train(2).step(2, outliers={1: ["body.bias"]})
    assert "when they were read after step 1, all were bit-identical." in build.end().only("DDP201").message
    build = RunBuilder(tmp_path / "b", 2).wrap().optimizer().step(0, outliers={1: ["body.bias"]})
    assert "after wrapping, all were bit-identical." in build.end().only("DDP201").message


def test_another_optimizer_on_all_ranks_is_not_left_out(tmp_path: Path) -> None:
    """It may have applied other gradients in between."""
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    for step in range(4):
        build.apply(step)
        build.step(step, outliers={1: ["body.bias"]} if step == 3 else None)
        if step < 3:
            build.step(step, optimizer=1)
    finding = build.end().only("DDP201")
    assert "before other optimizers stepped" in finding.message
    assert finding.cause.startswith("not known: other optimizers step parameters of the same module")


def test_same_gradients_only_as_far_as_they_were_read(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    for step in range(3):
        build.apply(step)
        build.step(step, outliers={1: ["body.bias"]} if step == 2 else None)
    cause = build.end().only("DDP201").cause
    assert "as far as they were read" in cause
    assert "memory error" in cause

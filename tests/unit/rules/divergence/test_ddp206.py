"""DDP206: optimizers differ across ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.analysis.aggregate import rank_data
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.modules import OptimizerRecord
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.reports.verdict import verdict_sentence
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
def test_another_learning_rate(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().optimizer()
    build.hyper(0, {rank: {"0.lr": 0.1, "0.betas": [0.9, 0.99]} for rank in build.ranks}).train(2)
    build.hyper(2, {1: {"0.lr": 0.05}})
    finding = build.step(2, outliers=OUTLIERS, hyper={1: "other"}).end().only("DDP206")
    assert (finding.ranks, finding.step, finding.cause) == (outliers, 2, "hyperparameters differ: lr")
    (row,) = finding.evidence["hyperparameters"]
    assert (row["group"], row["name"]) == (0, "lr")
    assert row["by_rank"] == {str(rank): 0.05 if rank == 1 else 0.1 for rank in build.ranks}


def test_the_scale_is_reported(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    build.hyper(0, {0: {"GradScaler.scale": 65536.0}, 1: {"GradScaler.scale": 32768.0}})
    finding = build.step(0, outliers=OUTLIERS, hyper={0: "x", 1: "y"}).end().only("DDP206")
    assert finding.cause == "hyperparameters differ: GradScaler.scale"
    assert finding.evidence["hyperparameters"][0]["group"] is None


def test_values_are_those_of_the_step_of_the_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changed later."""
    monkeypatch.setattr(rank_data, "MOST_HYPER_CHANGES", 1000)
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    for step in range(2500):
        build.hyper(step, {0: {"0.lr": 1.0 + step}, 1: {"0.lr": 1.0 + step if step < 100 else -1.0 - step}})
        build.step(
            step, outliers=OUTLIERS if step >= 100 else None, hyper={0: "x", 1: "x" if step < 100 else "y"}
        )
    finding = build.end().only("DDP206")
    assert finding.step == 100
    assert finding.evidence["hyperparameters"][0]["by_rank"] == {"0": 101.0, "1": -101.0}


def test_ranks_that_still_agree_get_a_note(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().hyper(0, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    (finding,) = build.step(0, hyper={0: "x", 1: "y"}).end().findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP206", "note", (0, 1))


def test_a_sharded_optimizer_with_another_rate_is_an_error_though_replicas_agree(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    for rank in build.ranks:
        build.add(rank, OptimizerRecord(0, "ZeroRedundancyOptimizer", 0, [[0, 1, 2]]))
    build.hyper(0, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}}).covered()
    report = build.step(0, hyper={0: "x", 1: "y"}).end().report()
    [finding] = report.findings
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP206", "error", (0, 1))
    assert finding.cause == "hyperparameters differ: lr"
    assert finding.evidence["hyperparameters"][0]["by_rank"] == {"0": 0.1, "1": 0.2}
    assert finding.evidence["replicas_agree"]
    assert not verdict_sentence(report).startswith("Replicas diverge")


def test_another_order_of_parameters(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer(on={2: [[0, 2, 1]]})
    finding = build.step(0, outliers={2: ["body.bias"]}).end().only("DDP206")
    assert "another order" in finding.cause
    assert [row["ranks"] for row in finding.evidence["parameter_order"]] == [[0, 1], [2]]


def test_an_optimizer_that_lacks_parameters(tmp_path: Path) -> None:
    """It applies different gradients, and that is correct."""
    build = RunBuilder(tmp_path, 3).wrap().optimizer(on={2: [[0, 2]]})
    build.apply(0, outliers={2: ["body.bias"]}, last="synced", synced=1, module=0, optimizer=0, moved=False)
    finding = build.step(0, outliers={2: ["body.bias"]}).end().only("DDP206")
    assert finding.cause == "the optimizer does not hold body.bias on rank 2, but does on other ranks"
    assert finding.ranks == (2,)


@pytest.mark.parametrize("outliers", [["body.bias"], []])
def test_an_optimizer_recreated_on_one_rank(tmp_path: Path, outliers: list[str]) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer().train(3)
    for step in range(3, 6):
        build.step(step, ranks=[0, 1])
        build.step(step, ranks=[2], outliers={2: outliers}, optimizer=1)
    (finding,) = build.end().findings()
    assert (finding.code, finding.step, finding.ranks) == ("DDP206", 3, (2,))
    assert finding.severity.value == ("error" if outliers else "note")
    assert "recreated on some ranks only" in finding.cause


def test_an_optimizer_recreated_on_all_ranks(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer().train(3)
    assert build.step(3, optimizer=1).step(4, optimizer=1).end().findings() == []


def test_another_state(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer()
    build.snapshot(
        Stage.STATE,
        0,
        of=TensorKind.STATE,
        outliers=OUTLIERS,
        optimizer=0,
        hyper=dict.fromkeys(build.ranks, "whole"),
    )
    assert (
        build.step(0, outliers=OUTLIERS).end().only("DDP206").cause
        == "optimizer state differs before the step"
    )


def test_the_parts_of_a_sharded_state_explain_nothing(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    build.snapshot(
        Stage.STATE, 0, of=TensorKind.STATE, outliers=OUTLIERS, optimizer=0, hyper={0: "left", 1: "right"}
    )
    build.step(0, outliers=OUTLIERS).end().only("DDP201")


def test_the_same_everywhere(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap().optimizer().hyper(0, {rank: {"0.lr": 0.1} for rank in range(4)})
    assert build.train(3).end().findings("DDP206") == []


def state(build: RunBuilder, step: int, ranks: list[int], part: str = "whole") -> RunBuilder:
    return build.snapshot(
        Stage.STATE,
        step,
        of=TensorKind.STATE,
        optimizer=0,
        ranks=ranks,
        hyper=dict.fromkeys(build.ranks, part),
    )


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (3, (1,))])
def test_one_rank_loaded_a_state(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = state(RunBuilder(tmp_path, world_size).wrap().optimizer().train(2), 2, [1])
    finding = build.step(2, outliers=OUTLIERS).end().only("DDP206")
    assert (finding.ranks, finding.step) == (outliers, 2)
    assert finding.cause == "optimizer state was loaded on rank 1 only"
    assert finding.evidence["state_loaded_on_ranks"] == [1]


def test_a_state_that_all_loaded_explains_nothing(tmp_path: Path) -> None:
    build = state(RunBuilder(tmp_path, 3).wrap().optimizer(), 0, [0, 1, 2])
    build.step(0, outliers=OUTLIERS).end().only("DDP201")


def test_a_state_loaded_after_the_divergence_explains_nothing(tmp_path: Path) -> None:
    build = state(RunBuilder(tmp_path, 3).wrap().optimizer().train(2).step(2, outliers=OUTLIERS), 3, [1])
    build.step(3, outliers=OUTLIERS).end().only("DDP201")


def test_a_rank_without_optimizer_records_may_have_loaded_too(tmp_path: Path) -> None:
    build = state(RunBuilder(tmp_path, 2).wrap().optimizer(), 0, [1])
    build.add(0, FaultRecord(probe="optimizers", entry="before_step", error="ValueError", where="", pid=1))
    report = build.step(0, outliers=OUTLIERS).end().report()
    assert [finding.code for finding in report.findings if finding.severity.value == "error"] == ["DDP201"]


def test_one_rank_that_loaded_and_stays_equal(tmp_path: Path) -> None:
    build = state(RunBuilder(tmp_path, 2).wrap().optimizer(), 0, [1])
    assert build.train(3).end().findings() == []


def test_the_fix_fits_the_order_of_parameters(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().optimizer(on={2: [[0, 2, 1]]})
    finding = build.step(0, outliers={2: ["body.bias"]}).end().only("DDP206")
    assert "same order" in finding.fix
    assert "learning rate" not in finding.fix


@pytest.mark.parametrize("rate", [0.1, 0.01])
def test_one_more_parameter_group(tmp_path: Path, rate: float) -> None:
    """Values of a group that the other rank does not have are no difference of hyperparameters."""
    build = RunBuilder(tmp_path, 3).wrap().optimizer(on={1: [[0, 1], [2]]})
    values = {"0.lr": 0.1, "0.momentum": 0.9}
    more = {"1.lr": rate, "1.momentum": 0.9}
    build.hyper(0, {0: values, 1: {**values, **more}, 2: values})
    finding = build.step(0, outliers=OUTLIERS, hyper={1: "y"}).end().only("DDP206")
    assert finding.cause == (
        "optimizers have different numbers of parameter groups (ranks 0 and 2: 1; rank 1: 2)"
    )
    assert "parameter groups" in finding.fix


@pytest.mark.parametrize(("begun", "named"), [(3, True), (1, False), (9, False)])
def test_a_second_optimizer_on_one_rank(tmp_path: Path, begun: int, named: bool) -> None:
    """It counts only if its first step lies between the last agreement and the divergence."""
    build = RunBuilder(tmp_path, 3).wrap().optimizer()
    for step in range(8):
        if step + 1 == begun:
            build.add(1, OptimizerRecord(1, "Adam", 0, [[2]], "train.py:9"))
            build.snapshot(Stage.PARAMS, step, optimizer=1, forward={1: begun}, ranks=[1])
        build.apply(step)
        build.step(step, outliers=OUTLIERS if step >= 3 else None)
    if begun > 8:
        build.snapshot(Stage.PARAMS, step, optimizer=1, forward={1: begun}, ranks=[1])
    findings = [finding for finding in build.end().findings() if finding.severity.value != "note"]
    [finding] = [finding for finding in findings if finding.step == 3]
    assert (finding.code == "DDP206") is named
    if named:
        assert finding.ranks == (1,)
        assert finding.cause.startswith("a second optimizer (Adam at train.py:9)")
    else:
        # Nothing claims what was not compared.
        assert "all applied the same gradients" not in finding.cause


def test_a_scaler_that_is_off_on_one_rank(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer()
    build.hyper(0, {0: {"GradScaler.scale": 64.0}, 1: {}})
    finding = build.step(0, outliers=OUTLIERS, hyper={0: "x", 1: "y"}).end().only("DDP206")
    assert "GradScaler is off on rank 1 only" in finding.cause

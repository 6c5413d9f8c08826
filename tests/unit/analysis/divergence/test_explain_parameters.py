"""The precedence of causes of diverging parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.modules import StructureRecord
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


def unknown_to_reducer(build: RunBuilder) -> None:
    build.add(1, StructureRecord(0, "replaced", "body.bias", 2, 2))


def rewritten(build: RunBuilder) -> None:
    build.rewrite(3, [1], OUTLIERS)


def state(build: RunBuilder) -> None:
    build.snapshot(
        Stage.STATE, 3, of=TensorKind.STATE, outliers=OUTLIERS, optimizer=0, hyper={0: "p", 1: "p"}
    )


# In the order in which they take precedence; each shows in the records before step 3.
CAUSES: list[tuple[str, str, Callable[[RunBuilder], None] | None]] = [
    ("DDP104", "replaced", unknown_to_reducer),
    ("DDP207", "a step was skipped on rank 1", None),
    ("DDP208", "written between two steps", rewritten),
    ("DDP208", "no optimizer steps these parameters", None),
    ("DDP206", "hyperparameters differ: lr", None),
    ("DDP206", "parameters in another order or other groups", None),
    ("DDP206", "optimizer state differs before the step", state),
    ("DDP201", "", None),
]


def with_causes(folder: Path, active: list[int]) -> RunBuilder:
    """A run that diverges at step 3, with evidence of all `active` causes."""
    build = RunBuilder(folder, 2).wrap()
    groups = [[0, 2]] if 3 in active else [[0, 1, 2]]
    build.optimizer(groups, on={1: [list(reversed(groups[0]))]} if 5 in active else None)
    build.train(3)
    for number in active:
        mark = CAUSES[number][2]
        if mark is not None:
            mark(build)
    if 4 in active:
        build.hyper(3, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    hyper = {0: "x", 1: "y"} if 4 in active else None
    forward = {1: 5} if 1 in active else None
    return build.step(3, outliers=OUTLIERS, hyper=hyper, forward=forward).end()


@pytest.mark.parametrize("number", range(len(CAUSES)))
def test_each_cause_by_itself(tmp_path: Path, number: int) -> None:
    code, cause, _ = CAUSES[number]
    finding = with_causes(tmp_path, [number]).only(code)
    assert cause in finding.cause
    assert finding.step == 3
    assert finding.parameter == (None if code == "DDP207" else "body.bias")


@pytest.mark.parametrize("number", range(len(CAUSES) - 1))
def test_the_more_exact_cause_takes_precedence(tmp_path: Path, number: int) -> None:
    code, cause, _ = CAUSES[number]
    finding = with_causes(tmp_path, list(range(number, len(CAUSES)))).only(code)
    assert cause in finding.cause


def later(build: RunBuilder) -> RunBuilder:
    unknown = StructureRecord(0, "replaced", "body.bias", 4, 4)
    build.add(1, unknown)
    build.rewrite(4, [1], OUTLIERS)
    build.hyper(4, {0: {"0.lr": 0.1}, 1: {"0.lr": 0.2}})
    build.snapshot(
        Stage.STATE, 4, of=TensorKind.STATE, outliers=OUTLIERS, optimizer=0, hyper={0: "p", 1: "p"}
    )
    return build.step(4, outliers=OUTLIERS, hyper={0: "x", 1: "y"}, forward={1: 9})


def test_events_after_the_divergence_explain_nothing(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(3).step(3, outliers=OUTLIERS)
    assert later(build).end().only("DDP201").step == 3


def test_a_divergence_at_wrapping_hides_later_ones(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(outliers=OUTLIERS, options={"init_sync": False}).optimizer()
    assert build.train(3, outliers=OUTLIERS).end().only("DDP101").step is None


def test_two_modules_have_two_findings(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().wrap(module=1)
    for step in range(3):
        build.step(step).step(step, module=1, optimizer=1, outliers=OUTLIERS if step == 2 else None)
    finding = build.end().only("DDP201")
    assert (finding.module, finding.step) == ("1", 2)


def test_a_module_of_one_rank_cannot_diverge(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(group=[0])
    build.step(0, ranks=[0])
    assert build.end().findings() == []

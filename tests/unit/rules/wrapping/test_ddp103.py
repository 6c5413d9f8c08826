"""DDP103: ranks built different parameters, or the same in another order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.modules import ModuleRecord
from tests.helpers.run_builder import NAMES, RunBuilder

SWAPPED = ["body.weight", "head.weight", "body.bias"]


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (3, (1,))])
def test_another_order(tmp_path: Path, world_size: int, outliers: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(names_on={1: SWAPPED})
    finding = build.train(2).end().only("DDP103")
    assert (finding.ranks, finding.parameter) == (outliers, "body.bias")
    assert finding.cause == "the same names in another order"
    assert finding.evidence["position"] == 1
    assert "body.bias (float32 4)" in finding.message
    assert "head.weight (float32 4)" in finding.message


@pytest.mark.parametrize("others", [[*NAMES, "extra.weight"], NAMES[:2], []])
def test_another_set(tmp_path: Path, others: list[str]) -> None:
    build = RunBuilder(tmp_path, 4).wrap(names_on={3: others})
    finding = build.end().only("DDP103")
    assert (finding.ranks, finding.cause) == ((3,), "different sets of parameters")
    assert "missing" in finding.message


def test_three_different_lists(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(names_on={1: SWAPPED, 2: ["body.weight"]})
    finding = build.end().only("DDP103")
    assert finding.ranks == (0, 1, 2, 3)
    assert [row["ranks"] for row in finding.evidence["at_that_position"]] == [[0, 3], [1], [2]]


def test_shapes_count(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    build.records[1][1].parameters[0][2] = [5]  # type: ignore[union-attr]
    assert "body.weight (float32 5)" in build.end().findings("DDP103")[0].message


def test_a_parameter_that_is_frozen_on_some_rank_is_the_same_parameter(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    build.records[1][1].parameters[0][3] = 0  # type: ignore[union-attr]
    assert build.end().findings("DDP103") == []


def test_the_same_order(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().end().findings("DDP103") == []


def test_different_ignored_parameters(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3)
    for rank in build.ranks:
        ignored = ["body.bias"] if rank == 2 else []
        rows = build.rows([name for name in NAMES if name not in ignored])
        build.add(rank, ModuleRecord(0, "Net", [0, 1, 2], 0, rows, [], ignored))
    finding = build.end().only("DDP103")
    assert (finding.ranks, finding.parameter) == ((2,), "body.bias")
    assert "ignore different parameters" in finding.cause
    assert finding.evidence["ignored"] == {"0": "nothing", "1": "nothing", "2": "body.bias"}
    assert "ignore the same parameters" in finding.fix

"""DDP104: a parameter was added, replaced or unfrozen after wrapping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.records.kinds.modules import ModuleRecord, StructureRecord
from tests.helpers.run_builder import RunBuilder


def changed(build: RunBuilder, change: str = "replaced", step: int = 1) -> RunBuilder:
    build.wrap().optimizer().train(step)
    for rank in build.ranks:
        build.add(rank, StructureRecord(0, change, "head.weight", step, step))
    return build


@pytest.mark.parametrize("change", ["added", "replaced", "unfrozen"])
@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (3, (2,))])
def test_replicas_diverge_in_it(
    tmp_path: Path, change: str, world_size: int, outliers: tuple[int, ...]
) -> None:
    build = changed(RunBuilder(tmp_path, world_size), change)
    finding = build.train(3, first=1, outliers={world_size - 1: ["head.weight"]}).end().only("DDP104")
    assert (finding.ranks, finding.parameter, finding.step) == (outliers, "head.weight", 1)
    assert finding.cause == f"{change} after wrapping"
    assert finding.evidence["noticed_at_step"] == 1


def test_ranks_that_still_agree_get_a_note(tmp_path: Path) -> None:
    (finding,) = changed(RunBuilder(tmp_path, 2)).train(3, first=1).end().findings()
    assert (finding.code, finding.severity.value, finding.step) == ("DDP104", "note", 1)
    assert finding.ranks == (0, 1)


def test_ranks_that_diverge_elsewhere_have_another_cause(tmp_path: Path) -> None:
    build = changed(RunBuilder(tmp_path, 2)).train(3, first=1, outliers={1: ["body.bias"]}).end()
    assert build.only("DDP201").parameter == "body.bias"
    assert [finding.severity.value for finding in build.findings("DDP104")] == ["note"]


def test_nothing_changed(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(3, outliers={1: ["head.weight"]}).end()
    assert build.findings("DDP104") == []


@pytest.mark.parametrize(("pruned_on", "ranks"), [((1,), (1,)), ((0, 1, 2), None)])
def test_parameters_that_are_renamed_on_some_ranks(
    tmp_path: Path, pruned_on: tuple[int, ...], ranks: tuple[int, ...] | None
) -> None:
    """Pruning renames a parameter and adds a mask. The gradients themselves may be equal."""
    build = RunBuilder(tmp_path, 3).wrap().optimizer().train(3)
    names = ["body.weight", "body.bias", "head.weight_orig"]
    for rank in pruned_on:
        record = ModuleRecord(0, "Net", [0, 1, 2], 0, build.rows(names), [], [], revision=1)
        build.add(rank, replace(record, buffers=build.rows(["head.weight_mask"])))
    if ranks is None:
        build.apply(3).step(3)
        assert build.end().findings("DDP104") == []
        return
    build.apply(3, outliers={1: ["head.weight"]}).step(3, outliers={1: ["head.weight"]})
    finding = build.end().only("DDP104")
    assert (finding.step, finding.ranks, finding.parameter) == (3, ranks, "head.weight")
    assert "head.weight is head.weight_orig there" in finding.message
    assert finding.evidence["new_buffers"] == ["head.weight_mask"]

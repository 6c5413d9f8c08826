"""DDP104: a parameter was added, replaced or unfrozen after wrapping."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.modules import StructureRecord
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

"""DDP604: environments differ across ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.records.kinds.rank import RankHeader
from tests.helpers.run_builder import RunBuilder


def other(build: RunBuilder, rank: int, **fields: str) -> RunBuilder:
    header = build.records[rank][0]
    assert isinstance(header, RankHeader)
    build.records[rank][0] = replace(header, **fields)  # type: ignore[arg-type]
    return build


@pytest.mark.parametrize(("world_size", "outliers"), [(2, (0, 1)), (4, (1,))])
@pytest.mark.parametrize("field", ["torch", "python", "backend"])
def test_another_version(tmp_path: Path, world_size: int, outliers: tuple[int, ...], field: str) -> None:
    build = other(RunBuilder(tmp_path, world_size), 1, **{field: "0.0.1"}).wrap().train(2)
    finding = build.end().only("DDP604")
    assert (finding.severity.value, finding.ranks) == ("warning", outliers)
    assert "rank 1: 0.0.1" in finding.message


def test_another_hash_leaves_ranks_unchecked(tmp_path: Path) -> None:
    build = other(RunBuilder(tmp_path, 3), 2, algorithm="multilinear-128").wrap().train(2)
    assert "NOT checked" in build.end().only("DDP604").message


def test_the_same_everywhere(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().train(2).end().findings("DDP604") == []

"""DDP102: parameters differed before the broadcast."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.records.kinds.digests import Stage
from tests.helpers.run_builder import NAMES, RunBuilder


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_start_from_their_own_numbers(tmp_path: Path, world_size: int) -> None:
    build = RunBuilder(tmp_path, world_size)
    (finding,) = build.wrap(outliers_before=dict.fromkeys(build.ranks, NAMES)).train(2).end().findings()
    assert (finding.code, finding.severity.value) == ("DDP102", "note")
    assert "3 of 3 parameters differed before wrapping" in finding.message
    assert "with rank 0's" in finding.message
    assert finding.ranks == tuple(build.ranks)


def test_the_first_rank_of_the_group_is_the_source(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(group=[2, 3], outliers_before={3: ["body.bias"]})
    (finding,) = build.end().findings("DDP102")
    assert "with rank 2's" in finding.message


def test_equal_before_wrapping(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().end().findings("DDP102") == []


def test_differences_after_the_broadcast_are_another_finding(tmp_path: Path) -> None:
    outliers = {1: ["body.bias"]}
    assert (
        RunBuilder(tmp_path, 2).wrap(outliers_before=outliers, outliers=outliers).end().findings("DDP102")
        == []
    )


def test_inconclusive_before_the_broadcast(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(outliers_before={1: ["body.bias"]})
    for rank in (0, 1):
        build.records[rank] = [
            r for r in build.records[rank] if getattr(r, "stage", "") != Stage.INIT_AFTER.value
        ]
    assert build.end().findings("DDP102") == []

"""DDP601: no rank, or not every rank, reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.run_builder import RunBuilder


def without_ranks(folder: Path, exit_code: int) -> RunBuilder:
    build = RunBuilder(folder, 2)
    build.records.clear()
    build.description["exit_code"] = exit_code
    return build


def test_no_rank_reported(tmp_path: Path) -> None:
    (finding,) = without_ranks(tmp_path, 0).findings()
    assert (finding.code, finding.ranks) == ("DDP601", ())
    assert "-S, -I or -E" in finding.cause
    assert "import ddpcheck.auto" in finding.fix


def test_no_rank_because_the_command_failed(tmp_path: Path) -> None:
    (finding,) = without_ranks(tmp_path, 3).findings()
    assert "exit status 3" in finding.message
    assert "failed before" in finding.cause


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_rank_is_missing(tmp_path: Path, world_size: int) -> None:
    build = RunBuilder(tmp_path, world_size).wrap().train(2).end()
    del build.records[1]
    finding = build.only("DDP601")
    assert finding.ranks == (1,)
    assert finding.evidence["reported"] == [rank for rank in range(world_size) if rank != 1]
    assert build.report().verdict.value == "incomplete"


def test_all_reported(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 4).wrap().end().findings("DDP601") == []

"""DDP210: buffers differ after synchronisation, or are mapped to different names."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_builder import RunBuilder

from ddpcheck.records.schema import Of, Stage

BUFFERS = ["norm.mean", "norm.var"]


def synced(build: RunBuilder, forward: int, odd: dict[int, list[str]] | None = None) -> RunBuilder:
    return build.look(Stage.BUFFERS, forward, BUFFERS, of=Of.BUFFERS, odd=odd, width=1)


@pytest.mark.parametrize(("world_size", "odd"), [(2, (0, 1)), (4, (3,))])
def test_buffers_that_differ(tmp_path: Path, world_size: int, odd: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(buffers=BUFFERS)
    synced(synced(build, 0), 1, {world_size - 1: ["norm.var"]})
    finding = build.end().only("DDP210")
    assert (finding.ranks, finding.step, finding.stage) == (odd, 1, "buffers")
    assert finding.parameter == "norm.var"


@pytest.mark.parametrize(("world_size", "odd"), [(2, (0, 1)), (4, (1,))])
def test_another_order(tmp_path: Path, world_size: int, odd: tuple[int, ...]) -> None:
    build = RunBuilder(tmp_path, world_size).wrap(buffers=BUFFERS, buffers_on={1: BUFFERS[::-1]})
    finding = build.end().only("DDP210")
    assert (finding.ranks, finding.parameter, finding.evidence["position"]) == (odd, "norm.mean", 0)
    assert finding.cause == "buffers mapped to different names"


@pytest.mark.parametrize("others", [[*BUFFERS, "extra"], BUFFERS[:1], []])
def test_one_rank_has_others(tmp_path: Path, others: list[str]) -> None:
    build = RunBuilder(tmp_path, 4).wrap(buffers=BUFFERS, buffers_on={2: others})
    finding = build.end().only("DDP210")
    place = min(len(others), 2)
    assert (finding.ranks, finding.evidence["position"]) == ((2,), place)
    assert finding.parameter == [*BUFFERS, "extra"][place]
    assert "not there" in finding.message


def test_three_lists_of_different_lengths(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(
        buffers=[*BUFFERS, "x"], buffers_on={1: [*BUFFERS, "y"], 2: ["norm.mean"]}
    )
    finding = build.end().only("DDP210")
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.evidence["position"] == 2


def test_equal_buffers(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=BUFFERS)
    assert synced(synced(build, 0), 1).end().findings() == []

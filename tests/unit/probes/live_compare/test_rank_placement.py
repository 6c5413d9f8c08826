"""Ranks publish their node, and each node reads the placements once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpcheck.probes.live_compare.store import RankPlacement

RANKS = 6


class Counting:
    """A store that records the requests."""

    def __init__(self) -> None:
        self.store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.requests.append(name)
        return getattr(self.store, name)


def ranks() -> list[RankPlacement]:
    return [RankPlacement("prefix", rank, RANKS) for rank in range(RANKS)]


def test_placements_are_unknown_before_all_ranks_have_published() -> None:
    store, placed = Counting(), ranks()
    for rank, placement in enumerate(placed[:-1]):
        placement.publish(store, f"node{rank // 2}", "host")
    assert placed[0].read(store, partial=False) == {}
    placements = placed[0].read(store, partial=True)
    assert [node for node, _ in placements.values()] == ["node0", "node0", "node1", "node1", "node2"]


def test_rank_0_collects_and_the_others_read_one_key() -> None:
    store, placed = Counting(), ranks()
    for rank, placement in enumerate(placed):
        placement.publish(store, f"node{rank // 2}", "host")
    assert placed[4].read(store, partial=False) == {}
    placements = placed[0].read(store, partial=False)
    assert sorted(placements) == list(range(RANKS))
    store.requests.clear()
    assert placed[4].read(store, partial=False) == placements
    assert store.requests == ["add", "check", "get"]


@pytest.mark.parametrize("partial", [True, False])
def test_without_rank_0_a_node_collects_by_itself(partial: bool) -> None:
    store, placed = Counting(), ranks()
    for placement in placed:
        placement.publish(store, "node", "host")
    answers = [placed[3].read(store, partial) for _ in range(1 if partial else 20)]
    assert sorted(answers[-1]) == list(range(RANKS))

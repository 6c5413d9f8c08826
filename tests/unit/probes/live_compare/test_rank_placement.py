"""Ranks that say where they are, and nodes that ask once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpcheck.probes.live_compare.store import RankPlacement

RANKS = 6


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.store, name)


def ranks() -> list[RankPlacement]:
    return [RankPlacement("drawer", rank, RANKS) for rank in range(RANKS)]


def test_nobody_knows_before_all_have_spoken() -> None:
    store, everyone = Counting(), ranks()
    for rank, one in enumerate(everyone[:-1]):
        one.say(store, f"node{rank // 2}")
    assert everyone[0].ask(store, at_last=False) == {}
    found = everyone[0].ask(store, at_last=True)
    assert [node for node, _ in found.values()] == ["node0", "node0", "node1", "node1", "node2"]


def test_rank_0_gathers_and_the_others_get_it_as_one_piece() -> None:
    store, everyone = Counting(), ranks()
    for rank, one in enumerate(everyone):
        one.say(store, f"node{rank // 2}")
    assert everyone[4].ask(store, at_last=False) == {}
    found = everyone[0].ask(store, at_last=False)
    assert sorted(found) == list(range(RANKS))
    store.asked.clear()
    assert everyone[4].ask(store, at_last=False) == found
    assert store.asked == ["add", "check", "get"]


@pytest.mark.parametrize("at_last", [True, False])
def test_without_rank_0_a_node_gathers_for_itself(at_last: bool) -> None:
    store, everyone = Counting(), ranks()
    for one in everyone:
        one.say(store, "node")
    answers = [everyone[3].ask(store, at_last) for _ in range(1 if at_last else 20)]
    assert sorted(answers[-1]) == list(range(RANKS))

"""Reduced gradients are dealt out to the ranks that sketch them."""

from __future__ import annotations

import random

import pytest

from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.sketch_shares import distribute, share_of, shares

LAYERS = (1 << 20, 1 << 10) * 8


@pytest.mark.parametrize("hands", [1, 2, 3, 4, 7, 64])
def test_every_gradient_is_somebodys(hands: int) -> None:
    sizes = tuple(random.Random(hands).choices(range(1000), k=33))
    dealt = distribute(sizes, hands)
    assert len(dealt) == hands
    assert sorted(place for hand in dealt for place in hand) == list(range(33))
    assert all(list(hand) == sorted(hand) for hand in dealt)


@pytest.mark.parametrize("hands", [2, 4, 8])
def test_weights_and_biases_in_turn_are_dealt_evenly(hands: int) -> None:
    work = [sum(LAYERS[place] for place in hand) for hand in distribute(LAYERS, hands)]
    assert max(work) == min(work)


def test_falling_sizes_are_dealt_back_and_forth() -> None:
    assert distribute((8, 7, 6, 5, 4, 3), 2) == ((0, 3, 4), (1, 2, 5))
    assert distribute((3, 4, 5, 6, 7, 8), 2) == ((1, 2, 5), (0, 3, 4))
    assert share_of([8, 7, 6, 5, 4, 3], 1, 2) == (1, 2, 5)


def test_readers_deal_as_the_ranks_did() -> None:
    rows = [["a", "float32", [2, 4], 1], ["b", "float32", [7], 1], ["c", "float32", [], 1]]
    assert shares(ModuleRecord(0, "Net", [3, 5], 0, rows, [])) == {3: (0,), 5: (1, 2)}

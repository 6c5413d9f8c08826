"""Distribution of the reduced gradients over the ranks that sketch them."""

from __future__ import annotations

import random

import pytest

from ddpcheck.records.codecs import distribute, share_of, shares
from ddpcheck.records.kinds.modules import ModuleRecord

LAYERS = (1 << 20, 1 << 10) * 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_every_gradient_has_one_rank(ranks: int) -> None:
    sizes = tuple(random.Random(ranks).choices(range(1000), k=33))
    distributed = distribute(sizes, ranks)
    assert len(distributed) == ranks
    assert sorted(index for share in distributed for index in share) == list(range(33))
    assert all(list(share) == sorted(share) for share in distributed)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_alternating_weights_and_biases_are_distributed_evenly(ranks: int) -> None:
    work = [sum(LAYERS[index] for index in share) for share in distribute(LAYERS, ranks)]
    assert max(work) == min(work)


def test_direction_alternates_between_rounds() -> None:
    assert distribute((8, 7, 6, 5, 4, 3), 2) == ((0, 3, 4), (1, 2, 5))
    assert distribute((3, 4, 5, 6, 7, 8), 2) == ((1, 2, 5), (0, 3, 4))
    assert share_of([8, 7, 6, 5, 4, 3], 1, 2) == (1, 2, 5)


def test_shares_of_a_module_record() -> None:
    rows = [["a", "float32", [2, 4], 1], ["b", "float32", [7], 1], ["c", "float32", [], 1]]
    assert shares(ModuleRecord(0, "Net", [3, 5], 0, rows, [])) == {3: (0,), 5: (1, 2)}

"""Every pair once, nobody twice in a round."""

from __future__ import annotations

from itertools import combinations

import pytest

from ddpcheck.links.survey import rounds


@pytest.mark.parametrize("count", range(9))
def test_everybody_meets_everybody_once_in_disjoint_pairs(count: int) -> None:
    plan = rounds(range(count))
    for pairs in plan:
        busy = [unit for pair in pairs for unit in pair]
        assert len(busy) == len(set(busy))
    met = sorted(tuple(sorted(pair)) for pairs in plan for pair in pairs)
    assert met == list(combinations(range(count), 2))
    assert len(plan) <= count

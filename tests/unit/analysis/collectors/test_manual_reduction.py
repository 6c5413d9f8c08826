"""What a job made of gradients that it reduces itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddpcheck.analysis.aggregate.rank_data import module_key
from ddpcheck.analysis.collectors.manual_reduction import (
    ManualReductionCollector,
    ManualReductionStats,
    PartlyReduced,
    partly_reduced_text,
)
from ddpcheck.records.codecs import pack
from ddpcheck.records.kinds.gradients import ManualReductionRecord
from tests.helpers.run_builder import sketch_of

# Of two parameters, on each of three ranks.
LOCAL = [(1.0, 8.0), (3.0, 32.0), (14.0, 128.0)]
MEAN = (6.0, 56.0)


def stats_of(
    applied: Sequence[tuple[float, float]],
    own_mean: bool = True,
    backwards: int = 1,
    local: Sequence[tuple[float, float]] = LOCAL,
) -> ManualReductionStats | None:
    module = module_key(range(3), 0)
    description: Any = SimpleNamespace(parameters=[["a", "float32", [4], 1], ["b", "float32", [4], 1]])
    collector = ManualReductionCollector(None)  # type: ignore[arg-type]
    for number, (own, result) in enumerate(zip(local, applied, strict=True)):
        rank: Any = SimpleNamespace(number=number, latest={module: description})
        record = ManualReductionRecord(
            module=0,
            optimizer=0,
            step=2,
            local=pack([sketch_of(value) for value in own]),
            applied=pack([sketch_of(value) for value in result]),
            own_mean=own_mean,
            backwards=backwards,
        )
        collector.add(rank, module, record)
    return collector.stats.get(module)


def partly(*applied: tuple[float, float]) -> PartlyReduced | None:
    stats = stats_of(applied)
    return None if stats is None else stats.partly.get(2)


def test_the_mean_and_the_sum() -> None:
    mean, summed = stats_of([MEAN] * 3), stats_of([(18.0, 168.0)] * 3)
    assert mean is not None
    assert summed is not None
    assert (mean.means, mean.sums, mean.reduced) == (1, 0, True)
    assert (summed.means, summed.sums, summed.first_sum) == (0, 1, 2)


@pytest.mark.parametrize(("own_mean", "backwards", "found"), [(True, 1, 1), (True, 3, 0), (False, 1, 0)])
def test_a_second_division_counts_for_a_mean_of_one_backward(
    own_mean: bool, backwards: int, found: int
) -> None:
    stats = stats_of([(2.0, 56.0 / 3)] * 3, own_mean, backwards)
    assert stats is not None
    assert stats.divided_twice == found


def test_a_parameter_that_is_left_out() -> None:
    assert partly((6.0, 8.0), (6.0, 32.0), (6.0, 128.0)) == PartlyReduced(2, left_out=(1,))


def test_a_group_of_ranks() -> None:
    found = partly((2.0, 20.0), (2.0, 20.0), LOCAL[2])
    assert found == PartlyReduced(2, groups=((0, 1), (2,)))
    text = partly_reduced_text(found, (0, 1, 2))
    assert text == "reduced within ranks 0-1, not over all ranks; rank 2 takes no part"


def test_a_group_that_also_leaves_a_parameter_out() -> None:
    assert partly((2.0, 8.0), (2.0, 32.0), (14.0, 128.0)) == PartlyReduced(
        2, left_out=(1,), groups=((0, 1), (2,))
    )


def test_a_rank_that_does_not_apply_the_result() -> None:
    found = partly(MEAN, MEAN, LOCAL[2])
    assert found == PartlyReduced(2, received_by=(0, 1))
    assert partly_reduced_text(found, (0, 1, 2)) == "rank 2 does not apply the reduced gradients"


def test_nothing_is_said_of_ranks_that_train_apart_or_scale_their_gradients() -> None:
    assert partly(*LOCAL) is None
    assert partly((0.1, 0.8), (0.3, 3.2), (1.4, 12.8)) is None


def test_parameters_with_the_same_gradients_on_all_ranks_are_not_reduced_for_certain() -> None:
    """As in front of layers that are divided among the ranks."""
    same = [(1.0, 8.0), (1.0, 32.0), (1.0, 128.0)]
    stats = stats_of(same, local=same)
    assert stats is not None
    assert stats.partly == {}


def test_ranks_with_the_same_batch_have_not_reduced_their_gradients() -> None:
    same = [(1.0, 8.0), (1.0, 8.0), (3.0, 128.0)]
    stats = stats_of(same, local=same)
    assert stats is not None
    assert stats.partly == {}

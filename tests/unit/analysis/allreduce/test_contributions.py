"""A rank that is missing from every mean is named although no single error exceeds the rounding bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import pytest

from ddpcheck.analysis.allreduce.contributions import Contribution, ContributionCheck
from ddpcheck.analysis.allreduce.mean_check import Compared, SketchTable, check_parts
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import pack, unpack

RANKS, PARAMETERS, ELEMENTS = 64, 16, 100
# Of bfloat16.
ROUNDOFF = 2.0**-8
MISSING = 37


@dataclass
class Job:
    """Sketches of normal gradients with a norm of 10, and of their mean with rounding errors."""

    seed: int = 1
    # Of the mean, relative to its norm: what 64 additions in bfloat16 leave.
    noise: float = 2.0 * ROUNDOFF
    ranks: int = RANKS
    # Share of the gradients that all ranks have in common.
    common: float = 0.0
    check: ContributionCheck = field(default_factory=ContributionCheck)
    steps: int = 0
    bound_exceeded: bool = False

    def __post_init__(self) -> None:
        self.draw = numpy.random.default_rng(self.seed)

    def gradients(self) -> numpy.ndarray:
        own = self.draw.normal(size=(self.ranks, PARAMETERS))
        return 10.0 * (own + self.common * self.draw.normal(size=PARAMETERS))

    def step(
        self, weights: numpy.ndarray | None = None, local: numpy.ndarray | None = None
    ) -> Contribution | None:
        """One reduction; `weights`: how often each rank enters it."""
        local = self.gradients() if local is None else local
        weights = numpy.ones(self.ranks) if weights is None else weights
        norm = 10.0 * (1 + self.common**2) ** 0.5
        scale = 10.0 * (1 / self.ranks + self.common**2) ** 0.5
        mean = weights @ local / self.ranks + self.draw.normal(size=PARAMETERS) * self.noise * scale
        table = SketchTable(
            {
                rank: pack(Sketch(value, norm, 0, ELEMENTS) for value in local[rank])
                for rank in range(self.ranks)
            }
        )
        results = unpack(pack(Sketch(value, scale, 0, ELEMENTS) for value in mean))
        compared = [
            Compared(table.parts(index), result, "bfloat16", ELEMENTS, index)
            for index, result in enumerate(results)
        ]
        outcomes = [
            check_parts(each.parts, each.result, each.dtype, ELEMENTS, self.ranks) for each in compared
        ]
        self.bound_exceeded = self.bound_exceeded or not all(outcome.ok for outcome in outcomes)
        self.steps += 1
        return self.check.add(self.steps, self.ranks, table, compared, [ROUNDOFF] * PARAMETERS)

    def until_found(self, weights: Callable[[int], numpy.ndarray], steps: int = 20) -> Contribution | None:
        for number in range(steps):
            if (found := self.step(weights(number))) is not None:
                return found
        return None


def weights(value: float, rank: int = MISSING, ranks: int = RANKS) -> numpy.ndarray:
    every = numpy.ones(ranks)
    every[rank] = value
    return every


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_rank_is_named_where_no_single_error_is_too_large(seed: int) -> None:
    job = Job(seed)
    found = job.until_found(lambda _: weights(0.0))
    assert found is not None
    assert (found.ranks, found.missing) == ((MISSING,), True)
    assert found.share == pytest.approx(0.0, abs=0.35)
    assert found.observations == found.reductions * PARAMETERS
    assert not job.bound_exceeded


def test_the_divisor_may_count_the_missing_rank_or_not() -> None:
    found = Job().until_found(lambda _: weights(0.0) * RANKS / (RANKS - 1))
    assert found is not None
    assert (found.ranks, found.missing) == ((MISSING,), True)


def test_a_rank_that_is_counted_twice() -> None:
    found = Job().until_found(lambda _: weights(2.0))
    assert found is not None
    assert (found.ranks, found.missing) == ((MISSING,), False)
    assert found.share == pytest.approx(2.0, abs=0.35)


def test_several_missing_ranks_are_all_named() -> None:
    job = Job(noise=0.2 * ROUNDOFF)
    found = job.until_found(lambda _: weights(0.0) * weights(0.0, 5))
    while found is not None and len(found.ranks) < 2 and job.steps < 20:
        found = job.step(weights(0.0) * weights(0.0, 5))
    assert found is not None
    assert found.ranks == (5, MISSING)


def test_a_rank_that_goes_missing_late_is_found_within_twenty_steps() -> None:
    job = Job()
    assert job.until_found(lambda _: weights(1.0), 40) is None
    found = job.until_found(lambda _: weights(0.0))
    assert found is not None
    assert found.ranks == (MISSING,)
    assert found.first_step > 40 - 20


def test_gradients_that_are_nearly_equal_on_all_ranks_show_that_one_is_missing() -> None:
    found = Job(common=30.0, noise=0.5 * ROUNDOFF).until_found(lambda _: weights(0.0))
    assert found is not None
    assert (found.ranks, found.missing) == ((), True)


@pytest.mark.parametrize("common", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.01, 1.0, 30.0])
def test_correct_reductions_are_not_accused(noise: float, common: float) -> None:
    job = Job(noise=noise * ROUNDOFF, common=common)
    assert job.until_found(lambda _: weights(1.0), 60) is None


def test_few_parameters_that_repeat_are_one_observation() -> None:
    """Two coefficients explain two errors exactly, however often these come again."""
    job = Job(noise=0.0)
    local = job.gradients()
    every = [job.step(weights(0.0), local) for _ in range(60)]
    assert every == [None] * 60


def test_few_ranks_are_left_to_the_bound() -> None:
    job = Job(ranks=7)
    assert job.until_found(lambda _: weights(0.0, 3, 7), 20) is None

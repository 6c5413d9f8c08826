"""The budget: checks become rarer until their cost fits, all ranks of a node agree, and a mismatch ends it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from ddpcheck.agent import budget as budget_module
from ddpcheck.agent.budget import (
    ALL_SCHEDULES,
    EPOCH,
    SCHEDULES,
    SLOW_READS_SHARE,
    UNMEASURED,
    Budget,
    Schedule,
)
from ddpcheck.config import Config, parse_budget
from ddpcheck.probes.probe import BudgetItem
from ddpcheck.records.kinds.timing import CostRecord
from ddpcheck.records.registry import Record

MICRO = 1000
# Two percent for what is measured.
BUDGET = f"{2 * UNMEASURED}"


class Rank:
    """One rank whose step takes a fixed time, and whose checks cost fixed times when they run."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        exchange: Any = None,
        option: str = BUDGET,
        step_us: int = 10_000,
        costs_us: tuple[int, int, int] = (0, 0, 0),
        fixed_us: int = 0,
    ) -> None:
        self.now, self.own_ns = 0, 0
        self.records: list[Record] = []
        self.step_us, self.costs_us, self.fixed_us = step_us, costs_us, fixed_us
        self.steps = 0
        self.spent_by_probe = {"gradients": 0, "parameters": 0}
        self.spent_by_item = [0] * len(BudgetItem)
        self._monkeypatch = monkeypatch
        self._use_clock()
        self.budget = Budget(Config(budget=option), exchange, self.records.append, self)

    def probe_ns(self) -> dict[str, int]:
        return dict(self.spent_by_probe)

    def item_ns(self) -> list[int]:
        return list(self.spent_by_item)

    def _use_clock(self) -> None:
        self._monkeypatch.setattr(budget_module, "perf_counter_ns", lambda: self.now)

    def step(self) -> tuple[bool, ...]:
        """Returns which budget_items ran."""
        self._use_clock()
        ran = tuple(self.budget.runs(item, self.steps) for item in BudgetItem)
        for item in BudgetItem:
            if ran[item]:
                spent = self.costs_us[item] * MICRO
                self.spent_by_item[item] += spent
                self.spent_by_probe["parameters" if item is BudgetItem.PARAMS else "gradients"] += spent
                self.own_ns += spent
                self.now += spent
        self.own_ns += self.fixed_us * MICRO
        self.now += (self.step_us + self.fixed_us) * MICRO
        self.budget.step_done(0, self.steps)
        self.steps += 1
        return ran

    def run(self, steps: int) -> list[tuple[bool, ...]]:
        return [self.step() for _ in range(steps)]

    def costs(self) -> list[CostRecord]:
        return [record for record in self.records if isinstance(record, CostRecord)]


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch) -> MakeRank:
    return lambda *args, **kwargs: Rank(monkeypatch, *args, **kwargs)


def test_schedules_become_sparser_and_stay_nested() -> None:
    assert SCHEDULES[0] == Schedule(1, 1, 1)
    assert ALL_SCHEDULES[: len(SCHEDULES)] == SCHEDULES
    for dense, sparse in pairwise(ALL_SCHEDULES):
        assert dense != sparse
        assert all(b % a == 0 for a, b in zip(dense, sparse, strict=True))
    # Sketches go first, parameters last.
    assert (
        SCHEDULES.index(Schedule(64, 1, 1))
        < SCHEDULES.index(Schedule(256, 64, 1))
        < SCHEDULES.index(SCHEDULES[-1])
    )
    assert max(schedule.params for schedule in SCHEDULES) == 64


def test_checks_within_the_budget_run_at_every_step(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(100, 50, 40))
    assert set(rank.run(5 * EPOCH)) == {(True, True, True)}


def test_first_steps_are_complete_then_sketches_become_rarer(make_rank: MakeRank) -> None:
    # 5 % of the step in sketches, 0.5 % in the rest.
    rank = make_rank(costs_us=(500, 25, 25))
    assert set(rank.run(EPOCH)) == {(True, True, True)}
    ran = rank.run(EPOCH)
    assert [step for step, (sketch, _, _) in enumerate(ran) if sketch] == list(range(0, EPOCH, 4))
    assert all(applied and params for _, applied, params in ran)
    cost = rank.costs()[1]
    assert (cost.step, cost.steps, cost.sketch_every, cost.applied_every, cost.params_every) == (
        64,
        64,
        4,
        1,
        1,
    )


def test_the_share_that_is_left_is_below_the_budget(make_rank: MakeRank) -> None:
    for costs in ((3000, 500, 100), (0, 900, 190), (20_000, 100, 100), (100, 100, 3000)):
        rank = make_rank(costs_us=costs)
        rank.run(EPOCH)
        own, now = rank.own_ns, rank.now
        rank.run(4 * EPOCH)
        assert (rank.own_ns - own) / (rank.now - now - rank.own_ns + own) <= 0.02, costs


def test_parameters_are_compared_less_often_only_for_their_own_cost(make_rank: MakeRank) -> None:
    dear = make_rank(costs_us=(0, 0, 1500))
    dear.run(EPOCH)
    assert [step for step, ran in enumerate(dear.run(EPOCH)) if ran[2]] == list(range(0, EPOCH, 8))
    # Here the fixed cost alone is above the budget: leaving out digests would not help.
    fixed = make_rank(costs_us=(100, 100, 150), fixed_us=400)
    fixed.run(EPOCH)
    assert all(params for _, _, params in fixed.run(EPOCH))
    assert fixed.budget.schedule == Schedule(256, 64, 1)


def test_digests_of_parameters_are_taken_less_often_in_very_short_steps(make_rank: MakeRank) -> None:
    rank = make_rank(step_us=200, costs_us=(60, 50, 40), fixed_us=100)
    rank.run(EPOCH)
    assert rank.budget.schedule == Schedule()
    rank.run(2 * EPOCH)
    assert rank.budget.schedule == Schedule(256, 64, 16)


def test_digests_of_parameters_within_the_budget_are_taken_after_every_step(make_rank: MakeRank) -> None:
    rank = make_rank(step_us=5_000, costs_us=(600, 500, 40), fixed_us=100)
    rank.run(EPOCH)
    assert all(params for _, _, params in rank.run(2 * EPOCH))


def test_a_cheaper_job_is_checked_more_often_again(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(1000, 0, 0))
    rank.run(2 * EPOCH)
    assert rank.budget.schedule.sketch == 8
    rank.step_us = 200_000
    rank.run(2 * EPOCH)
    assert rank.budget.schedule.sketch == 1


# A device without a kernel: what operators of torch take on the host, relative to a step of 10 ms.
SLOW = [(500, 300, 200), (30_000, 15_000, 10_000), (3_000_000, 1_500_000, 1_000_000)]


@pytest.mark.parametrize("costs", SLOW)
@pytest.mark.parametrize("option", ["2", "5", "50"])
def test_slow_reads_take_at_most_five_percent_of_a_step(
    make_rank: MakeRank, costs: tuple[int, int, int], option: str
) -> None:
    rank = make_rank(option=option, costs_us=costs)
    rank.budget.limit_slow_reads()
    first = rank.run(EPOCH)
    # One step shows what it costs; no other one of the first epoch is checked.
    assert first == [(True, True, True)] + [(False, False, False)] * (EPOCH - 1)
    own, now = rank.own_ns, rank.now
    steps = rank.run(2 * max(ALL_SCHEDULES[-1].params, EPOCH))
    share = (rank.own_ns - own) / (rank.now - now - (rank.own_ns - own))
    # Half of the share is for kernels on the device, whose time is not known here.
    assert share <= min(SLOW_READS_SHARE, float(option) / 100) / 2
    assert any(params for _, _, params in steps)


def test_slow_reads_count_time_on_the_device(make_rank: MakeRank) -> None:
    levels = []
    for device_us in (0, 1000, 30_000):
        rank = make_rank(option="5", costs_us=(300, 200, 100))
        rank.budget.limit_slow_reads()
        for _ in range(20 * EPOCH):
            if any(rank.step()):
                rank.budget.add_device_time(device_us * MICRO)
        levels.append(ALL_SCHEDULES.index(rank.budget.schedule))
    assert levels[0] < levels[1] < levels[2]


def test_a_mismatch_does_not_lift_the_limit_of_slow_reads(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(3_000_000, 1_000_000, 1_000_000))
    rank.budget.limit_slow_reads()
    rank.run(2)
    rank.budget.check_everything()
    assert not any(any(ran) for ran in rank.run(EPOCH - 2))


def test_slow_reads_with_the_budget_off_check_every_step(make_rank: MakeRank) -> None:
    rank = make_rank(option="off", costs_us=(30_000, 10_000, 10_000))
    rank.budget.limit_slow_reads()
    assert set(rank.run(2 * EPOCH)) == {(True, True, True)}


def test_kernels_on_the_device_count_and_are_recorded(make_rank: MakeRank) -> None:
    """With a kernel, too: reading three gigabytes takes a device a millisecond, and the host nothing."""
    rank = make_rank(costs_us=(10, 10, 10))
    for _ in range(EPOCH):
        rank.step()
        rank.budget.add_device_time(600 * MICRO)
    assert rank.costs()[0].device == 600 * (EPOCH - 1)
    rank.run(1)
    assert rank.budget.schedule.sketch > 1


class Exchange:
    """One rank's view of the levels that ranks of a node have published."""

    def __init__(self, published: dict[int, tuple[int, int]], rank: int) -> None:
        self._published, self._rank = published, rank

    def publish_budget_level(self, epoch: int, level: int) -> None:
        self._published[self._rank] = epoch, level

    def budget_levels(self, epoch: int) -> list[int]:
        return [level for of, level in self._published.values() if of == epoch]


def test_ranks_of_a_node_use_the_sparsest_schedule_at_the_same_step(make_rank: MakeRank) -> None:
    published: dict[int, tuple[int, int]] = {}
    ranks = [
        make_rank(exchange=Exchange(published, number), costs_us=(cost, 10, 10))
        for number, cost in enumerate((100, 700, 300))
    ]
    for _ in range(4 * EPOCH):
        assert len({rank.step() for rank in ranks}) == 1
    assert {rank.budget.schedule.sketch for rank in ranks} == {4}


def test_off_checks_everything(make_rank: MakeRank) -> None:
    rank = make_rank(option="off", costs_us=(50_000, 50_000, 50_000))
    assert set(rank.run(3 * EPOCH)) == {(True, True, True)}
    # The begin of the first step is not known.
    assert [record.steps for record in rank.costs()] == [EPOCH - 1, EPOCH, EPOCH]


def test_after_a_mismatch_everything_is_checked(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(5000, 100, 100))
    rank.run(EPOCH + 10)
    rank.budget.check_everything()
    assert set(rank.run(3 * EPOCH)) == {(True, True, True)}
    assert [(cost.step, cost.steps, cost.sketch_every) for cost in rank.costs()][:3] == [
        (1, 63, 1),
        (64, 10, 256),
        (74, 54, 1),
    ]


def test_costs_are_recorded_by_probe(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(60, 20, 15), fixed_us=5)
    rank.run(EPOCH + 3)
    rank.budget.close()
    first, rest = rank.costs()
    steps = EPOCH - 1
    assert first.spent == {"gradients": 80 * steps, "parameters": 15 * steps, "agent": 5 * steps}
    assert (first.wall, rest.step, rest.steps, rest.wall) == (10_100 * steps, EPOCH, 3, 10_100 * 3)
    rank.budget.close()
    assert len(rank.costs()) == 2


def test_estimates_of_probes_do_not_exceed_what_was_measured(make_rank: MakeRank) -> None:
    rank = make_rank(costs_us=(60, 20, 20))
    rank.run(EPOCH)
    # As if the only step with much work had been the one from which others are estimated.
    rank.spent_by_probe["gradients"] *= 3
    rank.run(EPOCH)
    rank.budget.close()
    for cost in rank.costs():
        assert sum(cost.spent.values()) <= 100 * cost.steps
    assert rank.costs()[1].spent["gradients"] > 20 * rank.costs()[1].steps


def test_steps_of_other_optimizers_do_not_count(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.run(2)
    rank.budget.step_done(1, 0)
    rank.budget.close()
    assert [record.steps for record in rank.costs()] == [1]


@pytest.mark.parametrize(("text", "share"), [("2", 0.02), ("0.5", 0.005), ("100", 1.0), ("off", None)])
def test_budget_option(text: str, share: float | None) -> None:
    assert parse_budget(text) == share


@pytest.mark.parametrize("text", ["0", "-1", "101", "nan", "two", ""])
def test_bad_budget_option(text: str) -> None:
    with pytest.raises(ValueError, match="percentage"):
        parse_budget(text)

"""Verification of reduced backwards: correct means pass, wrong ones are reported, and memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ddpcheck.analysis.allreduce import collector
from ddpcheck.analysis.allreduce.collector import AllReduceVerifier, MeanCheckStats
from ddpcheck.records.codecs import pack, shares
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import ModuleRecord
from tests.helpers.run_builder import sketch_of

NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")
HEALTHY = {0: [1.0, 2.0, -3.0, 0.5], 1: [3.0, -2.0, 5.0, 0.25]}
MEAN = [2.0, 0.0, 1.0, 0.375]


class Ranks:
    """Feeds a verifier with the records of some ranks."""

    def __init__(self, world_size: int = 2) -> None:
        self.verifier = AllReduceVerifier()
        self.module = (tuple(range(world_size)), 0)
        self.ended: set[int] = set()
        rows = [[name, "float32", [4], 1] for name in NAMES]
        self.description = ModuleRecord(0, "Net", list(self.module[0]), 0, rows, [])

    def add(
        self, rank: int, number: int, own: Sequence[float], reduced: Sequence[float], **fields: Any
    ) -> None:
        share = shares(self.description).get(rank, ())
        record = BackwardRecord(
            number=number,
            step=number - 1,
            local=fields.pop("local", pack(map(sketch_of, own))),
            reduced=pack(sketch_of(reduced[index]) for index in share if index < len(reduced)),
            root=repr(list(reduced)),
            **fields,
        )
        self.verifier.add(rank, self.module, record, self.description, self.ended)

    def backward(
        self, number: int, local: Mapping[int, Sequence[float]], reduced: Sequence[float], **fields: Any
    ) -> Ranks:
        for rank, own in local.items():
            self.add(rank, number, own, reduced, **fields)
        return self

    @property
    def stats(self) -> MeanCheckStats:
        return self.verifier.stats.get(self.module, MeanCheckStats())


def test_a_correct_mean_passes() -> None:
    ranks = Ranks()
    for number in range(1, 6):
        ranks.backward(number, HEALTHY, MEAN)
    assert (ranks.stats.checked, ranks.stats.mismatches, ranks.stats.first) == (5, 0, None)
    assert (ranks.stats.diverged, ranks.stats.unreduced, ranks.stats.identical) == (None, 0, {})
    assert ranks.stats.worst_relative < 1e-6


def test_a_sum_that_was_not_divided() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN).backward(2, HEALTHY, [2 * x for x in MEAN])
    first = ranks.stats.first
    assert first is not None
    assert (first.number, first.step, NAMES[first.index]) == (2, 1, "body.weight")
    assert first.outcome.error == pytest.approx(2.0, rel=1e-6)
    assert (ranks.stats.checked, ranks.stats.mismatches, ranks.stats.unreduced) == (2, 1, 0)
    # Equal results on all ranks are not a divergence.
    assert ranks.stats.diverged is None


def test_the_first_mismatch_is_kept() -> None:
    ranks = Ranks()
    for number in range(1, 5):
        ranks.backward(number, HEALTHY, [number * x for x in MEAN])
    assert ranks.stats.first is not None
    assert (ranks.stats.first.number, ranks.stats.mismatches) == (2, 3)


def test_only_one_parameter_is_off() -> None:
    ranks = Ranks().backward(1, HEALTHY, [2.0, 0.0, 1.0, 0.376])
    assert ranks.stats.first is not None
    assert (NAMES[ranks.stats.first.index], ranks.stats.first.rank) == ("head.bias", 0)


def test_one_rank_holds_something_else() -> None:
    ranks = Ranks(3)
    local = {0: [1.0] * 4, 1: [2.0] * 4, 2: [6.0] * 4}
    ranks.backward(1, local, [3.0] * 4)
    for rank, own in local.items():
        ranks.add(rank, 2, own, [3.0] * 4 if rank != 2 else [3.0, 3.0, 7.0, 3.0])
    assert (ranks.stats.diverged, ranks.stats.agreed_until) == ((2, 1), 0)
    assert ranks.stats.first is not None
    # Rank 2 writes the third parameter, which is wrong there.
    assert (ranks.stats.first.index, ranks.stats.first.rank) == (2, 2)


def test_gradients_that_were_never_touched() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.add(rank, 2, own, own)
    assert (ranks.stats.unreduced, ranks.stats.reduced_until) == (1, 0)
    assert ranks.stats.mismatches == 1


def test_equal_gradients_everywhere_are_not_untouched() -> None:
    """The mean of equal gradients equals each of them, so a missing reduction does not show."""
    ranks = Ranks().backward(1, {0: MEAN, 1: MEAN}, MEAN)
    assert (ranks.stats.unreduced, ranks.stats.mismatches) == (0, 0)


def test_identical_gradients() -> None:
    ranks = Ranks(4)
    local = {0: HEALTHY[0], 1: HEALTHY[1], 2: HEALTHY[0], 3: [0.0] * 4}
    mean = [sum(column) / 4 for column in zip(*local.values(), strict=True)]
    ranks.backward(1, local, mean).backward(2, local, mean)
    assert ranks.stats.identical == {(0, 2): 2}


@pytest.mark.parametrize("own", [[0.0] * 4, [math.nan, 1.0, 1.0, 1.0]])
def test_empty_and_non_finite_gradients_are_not_identical(own: list[float]) -> None:
    assert Ranks().backward(1, {0: own, 1: own}, own).stats.identical == {}


def test_where_a_nan_began() -> None:
    ranks = Ranks(3).backward(1, dict.fromkeys(range(3), [1.0] * 4), [1.0] * 4)
    for rank in range(3):
        own = [1.0, 1.0, math.nan, 1.0] if rank == 1 else [1.0] * 4
        mine = {"2": 7} if rank == 1 else {}
        ranks.add(
            rank, 2, own, [1.0, 1.0, math.nan, 1.0], local_nonfinite=mine, reduced_nonfinite={"2": 7, "3": 1}
        )
    nonfinite = ranks.stats.nonfinite
    assert nonfinite is not None
    assert (nonfinite.step, nonfinite.ranks, NAMES[nonfinite.index], nonfinite.count) == (
        1,
        (1,),
        "head.weight",
        7,
    )
    # The local gradients and the result both have it: the mean is correct.
    assert ranks.stats.mismatches == 0


def test_the_first_nan_is_kept() -> None:
    ranks = Ranks()
    for number, maker in ((1, 1), (2, 0)):
        for rank in (0, 1):
            own = [math.nan if rank == maker else 1.0] * 4
            mine = {"0": 4} if rank == maker else {}
            ranks.add(rank, number, own, [math.nan] * 4, local_nonfinite=mine, reduced_nonfinite={"0": 4})
    assert ranks.stats.nonfinite is not None
    assert (ranks.stats.nonfinite.step, ranks.stats.nonfinite.ranks) == (0, (1,))


def test_a_nan_between_two_sketches() -> None:
    """Only the rank of origin writes a record; one backward later all ranks have the values."""
    ranks = Ranks()
    ranks.add(1, 25, [], [], local_nonfinite={"2": 3}, reduced_nonfinite={"2": 3})
    for number in (26, 27):
        for rank in (0, 1):
            ranks.add(rank, number, [], [], local_nonfinite={"0": 4}, reduced_nonfinite={"0": 4})
    ranks.verifier.end()
    nonfinite = ranks.stats.nonfinite
    assert nonfinite is not None
    assert (nonfinite.number, nonfinite.ranks, nonfinite.index, nonfinite.count) == (25, (1,), 2, 3)
    # Nothing was sketched, so nothing was checked.
    assert (ranks.stats.checked, ranks.stats.mismatches) == (0, 0)


def test_a_nan_that_the_reduction_lost() -> None:
    ranks = Ranks()
    ranks.add(0, 1, [math.nan, 1.0, 1.0, 1.0], [1.0] * 4, local_nonfinite={"0": 1})
    ranks.add(1, 1, [1.0] * 4, [1.0] * 4)
    assert ranks.stats.first is not None
    assert (ranks.stats.first.index, ranks.stats.first.outcome.error) == (0, math.inf)


def test_what_is_absent_is_not_checked() -> None:
    off = [9.0, 0.0, 9.0, 0.375]
    assert Ranks().backward(1, HEALTHY, off, absent=[0, 2]).stats.mismatches == 0
    assert Ranks().backward(1, HEALTHY, off, absent=[0]).stats.mismatches == 1


def test_under_join_ranks_that_ran_out_add_nothing() -> None:
    ranks = Ranks(4)
    ranks.verifier.joined.add(ranks.module)
    local = {0: [4.0] * 4, 2: [8.0] * 4}
    ranks.backward(1, local, [3.0] * 4).verifier.end()
    assert (ranks.stats.checked, ranks.stats.mismatches) == (1, 0)


def test_under_join_the_divisor_may_be_the_live_ranks() -> None:
    for divisor, missed in ((-1, 0), (0, 1)):
        ranks = Ranks(4)
        ranks.verifier.joined.add(ranks.module)
        ranks.backward(1, {0: [4.0] * 4, 2: [8.0] * 4}, [6.0] * 4, divisor=divisor).verifier.end()
        assert (ranks.stats.checked, ranks.stats.mismatches) == (1, missed)


def test_under_join_a_record_of_a_lost_rank_that_comes_late_is_not_that_of_the_only_one_with_data() -> None:
    ranks = Ranks()
    ranks.verifier.joined.add(ranks.module)
    ranks.verifier.lost.add(1)
    ranks.add(0, 1, HEALTHY[0], MEAN)
    ranks.add(1, 1, HEALTHY[1], MEAN)
    ranks.verifier.end()
    assert (ranks.stats.checked, ranks.stats.mismatches) == (0, 0)


def test_under_join_a_rank_that_has_not_described_the_module_may_have_added_something() -> None:
    ranks = Ranks()
    ranks.verifier.joined.add(ranks.module)
    ranks.verifier.describes = lambda rank, module: rank == 0
    ranks.add(0, 1, HEALTHY[0], MEAN)
    ranks.verifier.end()
    assert (ranks.stats.checked, ranks.stats.mismatches) == (0, 0)


def test_under_join_a_rank_that_was_lost_may_have_added_something() -> None:
    ranks = Ranks(3)
    ranks.verifier.joined.add(ranks.module)
    ranks.verifier.lost.add(2)
    ranks.backward(1, {0: [3.0] * 4, 1: [3.0] * 4}, [5.0] * 4).verifier.end()
    assert ranks.stats.checked == 0


@pytest.mark.parametrize("known_to_be_gone", [False, True])
def test_a_rank_that_stops_is_not_a_wrong_mean(known_to_be_gone: bool) -> None:
    """Its contribution is in the result, but not in the records."""
    ranks = Ranks(3).backward(1, {0: [1.0] * 4, 1: [2.0] * 4, 2: [6.0] * 4}, [3.0] * 4)
    if known_to_be_gone:
        ranks.ended.add(2)
    ranks.backward(2, {0: [1.0] * 4, 1: [2.0] * 4}, [3.0] * 4).verifier.end()
    assert (ranks.stats.checked, ranks.stats.mismatches) == (1, 0)


def test_records_of_the_other_ranks_still_count() -> None:
    ranks = Ranks(3)
    ranks.ended.add(2)
    ranks.add(0, 1, [1.0] * 4, [3.0] * 4)
    ranks.add(1, 1, [1.0] * 4, [4.0] * 4)
    assert (ranks.stats.diverged, ranks.stats.identical) == ((1, 0), {(0, 1): 1})


def test_a_group_of_one_has_no_mean_to_check() -> None:
    ranks = Ranks(1).backward(1, {0: [1.0] * 4}, [2.0] * 4, reduced_nonfinite={"1": 1})
    assert (ranks.stats.checked, ranks.stats.mismatches) == (0, 0)
    assert ranks.stats.nonfinite is not None


@pytest.mark.parametrize("text", ["abc", "\u00e9" * 5, "~~~~~~~~~~"])
def test_a_damaged_record_is_skipped(text: str) -> None:
    ranks = Ranks()
    ranks.add(0, 1, HEALTHY[0], MEAN, local=text)
    ranks.add(1, 1, HEALTHY[1], MEAN)
    ranks.backward(2, HEALTHY, MEAN)
    assert (ranks.stats.checked, ranks.stats.mismatches) == (1, 0)


def test_a_record_of_a_rank_outside_the_group() -> None:
    ranks = Ranks()
    ranks.add(7, 1, HEALTHY[0], MEAN)
    ranks.backward(1, HEALTHY, MEAN).verifier.end()
    assert (ranks.stats.checked, ranks.stats.mismatches) == (1, 0)


def test_nothing_is_pending_while_all_ranks_report() -> None:
    ranks = Ranks()
    for number in range(1, 2001):
        ranks.backward(number, HEALTHY, MEAN)
        assert not ranks.verifier._pending
    assert ranks.stats.checked == 2000


@pytest.mark.parametrize("joined", [False, True])
def test_pending_values_are_bounded_behind_a_silent_rank(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    monkeypatch.setattr(collector, "MOST_PENDING", 64)
    ranks = Ranks()
    if joined:
        ranks.verifier.joined.add(ranks.module)
    local, reduced = pack(map(sketch_of, HEALTHY[0])), pack(map(sketch_of, MEAN[::2]))
    for number in range(1, 10_001):
        record = BackwardRecord(number=number, step=number - 1, local=local, reduced=reduced, root="a")
        ranks.verifier.add(0, ranks.module, record, ranks.description, ranks.ended)
        assert len(ranks.verifier._pending) <= 64
    # The other rank may only be slow, so no wrong mean is reported.
    assert (ranks.stats.checked, ranks.stats.mismatches) == (0, 0)


def test_the_real_limit_leaves_room_for_ranks_that_are_read_in_turn() -> None:
    from ddpcheck.analysis.run_reader import MOST_AHEAD

    assert collector.MOST_PENDING >= 4 * MOST_AHEAD


def test_part_of_the_model_is_unchanged() -> None:
    """Both ranks report it, each for a parameter of its share; the others were reduced."""
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.add(rank, 2, own, [*own[:2], *MEAN[2:]])
    assert (ranks.stats.unreduced, ranks.stats.reduced_until) == (1, 0)


def test_one_unchanged_parameter_may_be_a_wrong_reduction() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.add(rank, 2, own, [own[0], *MEAN[1:]])
    assert (ranks.stats.unreduced, ranks.stats.mismatches) == (0, 1)

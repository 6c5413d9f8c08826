"""The ledger of reduced backwards: right means pass, wrong ones are named, and nothing piles up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ddpcheck.analysis.allreduce import verify
from ddpcheck.analysis.allreduce.verify import AllReduceVerifier, MeanCheckStats
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.sketch_codec import pack
from ddpcheck.records.sketch_shares import shares
from tests.helpers.run_builder import sketch_of

NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")
HEALTHY = {0: [1.0, 2.0, -3.0, 0.5], 1: [3.0, -2.0, 5.0, 0.25]}
MEAN = [2.0, 0.0, 1.0, 0.375]


class Ranks:
    """Feeds a ledger with what some ranks say."""

    def __init__(self, world_size: int = 2) -> None:
        self.ledger = AllReduceVerifier()
        self.module = (tuple(range(world_size)), 0)
        self.gone: set[int] = set()
        rows = [[name, "float32", [4], 1] for name in NAMES]
        self.description = ModuleRecord(0, "Net", list(self.module[0]), 0, rows, [])

    def say(self, rank: int, number: int, own: Sequence[float], got: Sequence[float], **fields: Any) -> None:
        share = shares(self.description).get(rank, ())
        record = BackwardRecord(
            number=number,
            step=number - 1,
            local=fields.pop("local", pack(map(sketch_of, own))),
            reduced=pack(sketch_of(got[place]) for place in share if place < len(got)),
            root=repr(list(got)),
            **fields,
        )
        self.ledger.add(rank, self.module, record, self.description, self.gone)

    def backward(
        self, number: int, local: Mapping[int, Sequence[float]], got: Sequence[float], **fields: Any
    ) -> Ranks:
        for rank, own in local.items():
            self.say(rank, number, own, got, **fields)
        return self

    @property
    def tally(self) -> MeanCheckStats:
        return self.ledger.tallies.get(self.module, MeanCheckStats())


def test_a_mean_is_a_mean() -> None:
    ranks = Ranks()
    for number in range(1, 6):
        ranks.backward(number, HEALTHY, MEAN)
    assert (ranks.tally.checked, ranks.tally.missed, ranks.tally.first) == (5, 0, None)
    assert (ranks.tally.parted, ranks.tally.untouched, ranks.tally.twins) == (None, 0, {})
    assert ranks.tally.worst_relative < 1e-6


def test_a_sum_that_was_not_divided() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN).backward(2, HEALTHY, [2 * x for x in MEAN])
    first = ranks.tally.first
    assert first is not None
    assert (first.number, first.step, NAMES[first.place]) == (2, 1, "body.weight")
    assert first.outcome.error == pytest.approx(2.0, rel=1e-6)
    assert (ranks.tally.checked, ranks.tally.missed, ranks.tally.untouched) == (2, 1, 0)
    # What every rank holds alike is no parting.
    assert ranks.tally.parted is None


def test_the_first_miss_is_kept() -> None:
    ranks = Ranks()
    for number in range(1, 5):
        ranks.backward(number, HEALTHY, [number * x for x in MEAN])
    assert ranks.tally.first is not None
    assert (ranks.tally.first.number, ranks.tally.missed) == (2, 3)


def test_only_one_parameter_is_off() -> None:
    ranks = Ranks().backward(1, HEALTHY, [2.0, 0.0, 1.0, 0.376])
    assert ranks.tally.first is not None
    assert (NAMES[ranks.tally.first.place], ranks.tally.first.rank) == ("head.bias", 0)


def test_one_rank_holds_something_else() -> None:
    ranks = Ranks(3)
    local = {0: [1.0] * 4, 1: [2.0] * 4, 2: [6.0] * 4}
    ranks.backward(1, local, [3.0] * 4)
    for rank, own in local.items():
        ranks.say(rank, 2, own, [3.0] * 4 if rank != 2 else [3.0, 3.0, 7.0, 3.0])
    assert (ranks.tally.parted, ranks.tally.together_until) == ((2, 1), 0)
    assert ranks.tally.first is not None
    # Rank 2 writes the third parameter, which is wrong there.
    assert (ranks.tally.first.place, ranks.tally.first.rank) == (2, 2)


def test_gradients_that_were_never_touched() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.say(rank, 2, own, own)
    assert (ranks.tally.untouched, ranks.tally.touched_until) == (1, 0)
    assert ranks.tally.missed == 1


def test_equal_gradients_everywhere_are_not_untouched() -> None:
    """The mean of the same is the same: nothing shows that it was not reduced."""
    ranks = Ranks().backward(1, {0: MEAN, 1: MEAN}, MEAN)
    assert (ranks.tally.untouched, ranks.tally.missed) == (0, 0)


def test_twins() -> None:
    ranks = Ranks(4)
    local = {0: HEALTHY[0], 1: HEALTHY[1], 2: HEALTHY[0], 3: [0.0] * 4}
    mean = [sum(column) / 4 for column in zip(*local.values(), strict=True)]
    ranks.backward(1, local, mean).backward(2, local, mean)
    assert ranks.tally.twins == {(0, 2): 2}


@pytest.mark.parametrize("own", [[0.0] * 4, [math.nan, 1.0, 1.0, 1.0]])
def test_nothing_and_what_is_not_finite_make_no_twins(own: list[float]) -> None:
    assert Ranks().backward(1, {0: own, 1: own}, own).tally.twins == {}


def test_where_a_nan_began() -> None:
    ranks = Ranks(3).backward(1, dict.fromkeys(range(3), [1.0] * 4), [1.0] * 4)
    for rank in range(3):
        own = [1.0, 1.0, math.nan, 1.0] if rank == 1 else [1.0] * 4
        mine = {"2": 7} if rank == 1 else {}
        ranks.say(
            rank, 2, own, [1.0, 1.0, math.nan, 1.0], local_nonfinite=mine, reduced_nonfinite={"2": 7, "3": 1}
        )
    found = ranks.tally.nonfinite
    assert found is not None
    assert (found.step, found.ranks, NAMES[found.place], found.count) == (1, (1,), "head.weight", 7)
    # It went in, it came out: the mean holds.
    assert ranks.tally.missed == 0


def test_the_first_nan_is_kept() -> None:
    ranks = Ranks()
    for number, maker in ((1, 1), (2, 0)):
        for rank in (0, 1):
            own = [math.nan if rank == maker else 1.0] * 4
            mine = {"0": 4} if rank == maker else {}
            ranks.say(rank, number, own, [math.nan] * 4, local_nonfinite=mine, reduced_nonfinite={"0": 4})
    assert ranks.tally.nonfinite is not None
    assert (ranks.tally.nonfinite.step, ranks.tally.nonfinite.ranks) == (0, (1,))


def test_a_nan_between_two_sketches() -> None:
    """Only the rank that made it writes, and is waited for; one backward later all ranks have it."""
    ranks = Ranks()
    ranks.say(1, 25, [], [], local_nonfinite={"2": 3}, reduced_nonfinite={"2": 3})
    for number in (26, 27):
        for rank in (0, 1):
            ranks.say(rank, number, [], [], local_nonfinite={"0": 4}, reduced_nonfinite={"0": 4})
    ranks.ledger.end()
    found = ranks.tally.nonfinite
    assert found is not None
    assert (found.number, found.ranks, found.place, found.count) == (25, (1,), 2, 3)
    # Nothing was sketched, so nothing was checked.
    assert (ranks.tally.checked, ranks.tally.missed) == (0, 0)


def test_a_nan_that_the_reduction_swallowed() -> None:
    ranks = Ranks()
    ranks.say(0, 1, [math.nan, 1.0, 1.0, 1.0], [1.0] * 4, local_nonfinite={"0": 1})
    ranks.say(1, 1, [1.0] * 4, [1.0] * 4)
    assert ranks.tally.first is not None
    assert (ranks.tally.first.place, ranks.tally.first.outcome.error) == (0, math.inf)


def test_what_is_absent_is_not_checked() -> None:
    off = [9.0, 0.0, 9.0, 0.375]
    assert Ranks().backward(1, HEALTHY, off, absent=[0, 2]).tally.missed == 0
    assert Ranks().backward(1, HEALTHY, off, absent=[0]).tally.missed == 1


def test_under_join_ranks_that_ran_out_add_nothing() -> None:
    ranks = Ranks(4)
    ranks.ledger.joined.add(ranks.module)
    local = {0: [4.0] * 4, 2: [8.0] * 4}
    ranks.backward(1, local, [3.0] * 4).ledger.end()
    assert (ranks.tally.checked, ranks.tally.missed) == (1, 0)


def test_under_join_the_divisor_may_be_the_live_ranks() -> None:
    for divisor, missed in ((-1, 0), (0, 1)):
        ranks = Ranks(4)
        ranks.ledger.joined.add(ranks.module)
        ranks.backward(1, {0: [4.0] * 4, 2: [8.0] * 4}, [6.0] * 4, divisor=divisor).ledger.end()
        assert (ranks.tally.checked, ranks.tally.missed) == (1, missed)


def test_under_join_a_rank_that_was_lost_may_have_added_something() -> None:
    ranks = Ranks(3)
    ranks.ledger.joined.add(ranks.module)
    ranks.ledger.lost.add(2)
    ranks.backward(1, {0: [3.0] * 4, 1: [3.0] * 4}, [5.0] * 4).ledger.end()
    assert ranks.tally.checked == 0


@pytest.mark.parametrize("known_to_be_gone", [False, True])
def test_a_rank_that_stops_is_no_wrong_mean(known_to_be_gone: bool) -> None:
    """What it added is in the result, and not in the records."""
    ranks = Ranks(3).backward(1, {0: [1.0] * 4, 1: [2.0] * 4, 2: [6.0] * 4}, [3.0] * 4)
    if known_to_be_gone:
        ranks.gone.add(2)
    ranks.backward(2, {0: [1.0] * 4, 1: [2.0] * 4}, [3.0] * 4).ledger.end()
    assert (ranks.tally.checked, ranks.tally.missed) == (1, 0)


def test_what_the_others_say_of_it_still_counts() -> None:
    ranks = Ranks(3)
    ranks.gone.add(2)
    ranks.say(0, 1, [1.0] * 4, [3.0] * 4)
    ranks.say(1, 1, [1.0] * 4, [4.0] * 4)
    assert (ranks.tally.parted, ranks.tally.twins) == ((1, 0), {(0, 1): 1})


def test_a_group_of_one_has_no_mean_to_check() -> None:
    ranks = Ranks(1).backward(1, {0: [1.0] * 4}, [2.0] * 4, reduced_nonfinite={"1": 1})
    assert (ranks.tally.checked, ranks.tally.missed) == (0, 0)
    assert ranks.tally.nonfinite is not None


@pytest.mark.parametrize("text", ["abc", "\u00e9" * 5, "~~~~~~~~~~"])
def test_a_damaged_record_is_passed_over(text: str) -> None:
    ranks = Ranks()
    ranks.say(0, 1, HEALTHY[0], MEAN, local=text)
    ranks.say(1, 1, HEALTHY[1], MEAN)
    ranks.backward(2, HEALTHY, MEAN)
    assert (ranks.tally.checked, ranks.tally.missed) == (1, 0)


def test_a_record_of_a_rank_outside_the_group() -> None:
    ranks = Ranks()
    ranks.say(7, 1, HEALTHY[0], MEAN)
    ranks.backward(1, HEALTHY, MEAN).ledger.end()
    assert (ranks.tally.checked, ranks.tally.missed) == (1, 0)


def test_nothing_piles_up_while_all_speak() -> None:
    ranks = Ranks()
    for number in range(1, 2001):
        ranks.backward(number, HEALTHY, MEAN)
        assert not ranks.ledger._pending
    assert ranks.tally.checked == 2000


@pytest.mark.parametrize("joined", [False, True])
def test_nothing_piles_up_behind_a_silent_rank(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    monkeypatch.setattr(verify, "MOST_PENDING", 64)
    ranks = Ranks()
    if joined:
        ranks.ledger.joined.add(ranks.module)
    local, got = pack(map(sketch_of, HEALTHY[0])), pack(map(sketch_of, MEAN[::2]))
    for number in range(1, 10_001):
        record = BackwardRecord(number=number, step=number - 1, local=local, reduced=got, root="a")
        ranks.ledger.add(0, ranks.module, record, ranks.description, ranks.gone)
        assert len(ranks.ledger._pending) <= 64
    # Whether the other was only slow cannot be told: no word of a wrong mean.
    assert (ranks.tally.checked, ranks.tally.missed) == (0, 0)


def test_the_real_limit_leaves_room_for_ranks_that_are_read_in_turn() -> None:
    from ddpcheck.analysis.run_reader import MOST_AHEAD

    assert verify.MOST_PENDING >= 4 * MOST_AHEAD


def test_part_of_the_model_stayed_as_it_was() -> None:
    """Both ranks say so, each of a parameter of its share; the rest was reduced."""
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.say(rank, 2, own, [*own[:2], *MEAN[2:]])
    assert (ranks.tally.untouched, ranks.tally.touched_until) == (1, 0)


def test_one_parameter_that_stayed_as_it_was_may_be_a_broken_reduction() -> None:
    ranks = Ranks().backward(1, HEALTHY, MEAN)
    for rank, own in HEALTHY.items():
        ranks.say(rank, 2, own, [own[0], *MEAN[1:]])
    assert (ranks.tally.untouched, ranks.tally.missed) == (0, 1)

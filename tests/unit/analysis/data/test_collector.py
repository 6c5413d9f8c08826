"""Data loaders, and how the samples of an epoch were distributed over ranks."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.data.batches import MOST_PENDING, Batches, ModuleBatches, Sameness, sameness
from ddpcheck.analysis.data.collector import DataCollector, LoaderPass, split, unpack
from ddpcheck.records.kinds.data import BatchRecord, EpochRecord, LoaderRecord
from ddpcheck.records.kinds.rank import RankHeader

MODULE = ((0, 1), 0)


def packed(samples: Iterable[int]) -> str:
    bits = sum(1 << sample for sample in set(samples))
    return base64.b64encode(zlib.compress(bits.to_bytes(64, "little"))).decode()


def passed(samples: list[int], length: int, complete: bool = True, stride: int = 1) -> LoaderPass:
    epoch = EpochRecord(
        0,
        0,
        len(samples),
        largest=4,
        fed=1,
        yielded=1,
        complete=complete,
        map=packed(s // stride for s in samples),
    )
    return LoaderPass(LoaderRecord(0, length, "Sampler", stride=stride), epoch)


@given(
    st.lists(st.lists(st.integers(0, 59), max_size=40), min_size=2, max_size=4),
)
def test_overlap_and_gaps_are_exact(dealt: list[list[int]]) -> None:
    epoch_split = split({rank: passed(samples, 60) for rank, samples in enumerate(dealt)})
    holders = [sum(sample in samples for samples in dealt) for sample in range(60)]
    assert epoch_split.overlap == sum(count > 1 for count in holders)
    assert epoch_split.missing == sum(count == 0 for count in holders)
    assert epoch_split.padding == max(0, sum(map(len, dealt)) - 60)


def test_an_epoch_that_ended_early_has_overlap_but_no_gaps() -> None:
    epoch_split = split({0: passed([0, 2], 60, complete=False), 1: passed([2, 3], 60)})
    assert (epoch_split.complete, epoch_split.overlap, epoch_split.missing) == (False, 1, None)


def test_datasets_of_other_lengths_are_not_compared() -> None:
    epoch_split = split({0: passed([0, 2], 60), 1: passed([2, 3], 61)})
    assert (epoch_split.overlap, epoch_split.missing) == (None, None)


def test_counts_of_a_large_dataset_are_scaled() -> None:
    epoch_split = split({0: passed([0, 7, 14], 35, stride=7), 1: passed([14, 21], 35, stride=7)})
    assert (epoch_split.exact, epoch_split.overlap, epoch_split.missing) == (False, 7, 7)


@pytest.mark.parametrize("text", ["", "not base64", base64.b64encode(b"not zlib").decode()])
def test_a_map_that_cannot_be_read_is_none(text: str) -> None:
    assert unpack(text) is None


def test_a_map_that_unpacks_to_too_many_bytes_is_truncated() -> None:
    bomb = base64.b64encode(zlib.compress(b"\xff" * 10_000_000)).decode()
    assert (unpack(bomb) or 0).bit_length() <= 8 << 16


def compared(rows: list[tuple[str, ...]], variety: int = 64) -> ModuleBatches:
    """One row per forward: the batch digest of each rank."""
    batches = ModuleBatches()
    for forward, row in enumerate(rows):
        records = {
            rank: BatchRecord(forward, digest=digest, variety=variety) for rank, digest in enumerate(row)
        }
        batches.compare(forward, records)
    return batches


@pytest.mark.parametrize(
    ("rows", "variety", "expected"),
    [
        ([("a", "a"), ("b", "b")], 64, Sameness.DUPLICATED),
        ([("a", "b"), ("c", "d")], 64, Sameness.NONE),
        ([("a", "a")], 64, Sameness.DUPLICATED),
        ([("a", "a")], 16, Sameness.NONE),
        ([("a", "a")] * 5, 64, Sameness.CONSTANT),
        ([("a", "a")] * 5, 1, Sameness.NONE),
        ([("a", "b")] * 5, 64, Sameness.NONE),
        # A warm-up with one fixed input, then data.
        ([("a", "a")] * 5 + [(f"b{n}", f"c{n}") for n in range(20)], 64, Sameness.NONE),
        # One coincidence among many.
        ([(f"b{n}", f"c{n}") for n in range(20)] + [("x", "x")], 64, Sameness.NONE),
        ([(f"b{n}", f"c{n}") for n in range(20)] + [("x", "x"), ("y", "y")], 64, Sameness.NOW_AND_THEN),
        # Small batches may be equal by chance.
        ([("a", "a"), ("b", "b"), ("c", "d"), ("e", "f"), ("g", "h")], 6, Sameness.NONE),
        ([("a", "a"), ("b", "b"), ("c", "d")], 6, Sameness.DUPLICATED),
        ([(f"{n}", f"{n}") for n in range(50)], 2, Sameness.NONE),
        ([("", ""), ("", "")], 64, Sameness.NONE),
        # Only two of three.
        ([("a", "a", "b"), ("c", "c", "d")], 64, Sameness.DUPLICATED),
    ],
)
def test_sameness(rows: list[tuple[str, ...]], variety: int, expected: Sameness) -> None:
    assert sameness(compared(rows, variety)) is expected


def test_the_ranks_that_share_a_batch_are_named() -> None:
    assert compared([("a", "b", "a", "c"), ("d", "e", "d", "f")]).batches.ranks() == (0, 2)


def test_forwards_at_other_steps_are_not_compared() -> None:
    batches = ModuleBatches()
    batches.compare(3, {0: BatchRecord(3, step=1, digest="a"), 1: BatchRecord(3, step=2, digest="a")})
    assert (batches.at_different_steps, batches.forwards) == (1, 0)


def test_regular_batches_have_one_usual_size() -> None:
    batches = ModuleBatches()
    for forward, sizes in enumerate([(4, 4), (4, 4), (4, 1)]):
        batches.compare(forward, {rank: BatchRecord(forward, rows=size) for rank, size in enumerate(sizes)})
    assert (batches.rows.uneven, batches.rows.ratio, batches.rows.regular()) == (1, 4.0, True)
    for forward in range(3, 20):
        batches.compare(forward, {rank: BatchRecord(forward, rows=forward + 9 * rank) for rank in (0, 1)})
    assert not batches.rows.regular()


def test_pending_values_are_bounded() -> None:
    batches = Batches()
    for forward in range(3 * MOST_PENDING):
        batches.add(0, MODULE, BatchRecord(forward, digest=str(forward)))
    assert len(batches._pending) <= MOST_PENDING
    batches.end_rank(1)
    assert not batches._pending


def test_an_epoch_without_a_record_of_every_rank_is_left_out() -> None:
    attempt = Attempt("a")
    data = attempt.collector(DataCollector)
    ranks = [RankData(RankHeader(rank, 3, "node0", rank, 1, "a", 1.0)) for rank in range(3)]
    for rank in ranks[:2]:
        data.add_loader(rank, LoaderRecord(0, 60, "Sampler"))
    data.add_epoch(ranks[0], MODULE, passed([1], 60).epoch)
    data.end(attempt)
    assert data.splits == {}
    # Without its loader, and not trained on: neither counts.
    data.add_epoch(ranks[2], MODULE, passed([1], 60).epoch)
    data.add_epoch(ranks[1], MODULE, EpochRecord(0, 0, 4, fed=1, yielded=9))
    assert data.repeats.keys() == {(MODULE, 0)}

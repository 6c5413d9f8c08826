"""Sums of records that are folded: collectors get from them what they would get from the records."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.records.kinds.folds import FoldedRecord
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.modules import HyperRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.kinds.timing import ClockRecord, CostRecord
from ddpcheck.records.registry import Record
from ddpcheck.records.summaries import Summary, contains_multiple, merged

HEADER = RankHeader(0, 1, "host", 1, "session", 1.0, 0, 0, "3", "2", "gloo", "cpu", "xxh3", [], {})


def folded(*rows: Record) -> FoldedRecord:
    summary = Summary()
    summary.add(rows)
    [fields] = summary.folded()
    return FoldedRecord(**fields)


def attempt_of(*records: Record) -> Attempt:
    attempt = Attempt("session")
    for record in records:
        attempt.feed(HEADER, record)
    attempt.end()
    return attempt


def test_cost() -> None:
    records = [
        CostRecord(8 * n, 8, 1000 + n, {"parameters": 10 * n, "gradients": 3}, 0, 1, 1, 1) for n in range(20)
    ]
    expected = attempt_of(*records).collector(CostCollector).table(None)
    assert attempt_of(folded(*records)).collector(CostCollector).table(None) == expected


def test_memory() -> None:
    records = [MemoryRecord(step, host=1000 + step % 7, high=2000 - step) for step in range(50)]
    expected = attempt_of(*records).memory.ranks[0]
    again = attempt_of(folded(*records)).memory.ranks[0]
    assert (again.most, again.reserved) == (expected.most, expected.reserved)
    assert min(again.after.values) >= 1000


def test_hyperparameters_keep_their_last_values() -> None:
    records = [HyperRecord(0, 5, {"0.lr": 0.1, "0.momentum": 0.9}), HyperRecord(0, 9, {"0.lr": 0.2})]
    for given in (records, [folded(*records)]):
        assert attempt_of(*given).ranks[0].hyper_at(0, 9) == {"0.lr": 0.2, "0.momentum": 0.9}


def test_numbers_of_lists_and_mappings() -> None:
    record = folded(
        ClockRecord(0, [5, 7], device={"wait": [1, -1]}), ClockRecord(2, [1], device={"wait": [4]})
    )
    assert record.numbers["total"] == [3, 13, 1, 7]
    assert record.numbers["device.wait"] == [3, 4, -1, 4]


@pytest.mark.parametrize("changed", [0, 3, 6])
def test_one_other_digest_gives_another_sum(changed: int) -> None:
    def rows(other: int) -> list[Record]:
        return [
            BackwardRecord(n + 1, n, "", "", f"{n * 7919 + (n == other):016x}", module=0) for n in range(7)
        ]

    assert folded(*rows(-1)).digests != folded(*rows(changed)).digests


def test_summaries_can_be_joined() -> None:
    rows = [CostRecord(4 * n, 4, 100 + n, {"parameters": n}) for n in range(10)]
    parts: list[dict[str, Any]] = []
    for some in (rows[:3], rows[3:], rows):
        summary = Summary()
        summary.add(some)
        parts += summary.folded()
    joined = merged(parts[0], parts[1])
    assert {name: joined[name] for name in parts[2]} == parts[2]


@pytest.mark.parametrize(
    ("record", "expected"),
    [(ClockRecord(31, [1]), False), (ClockRecord(31, [1, 1]), True), (CostRecord(1, 31, 0), False),
     (CostRecord(1, 32, 0), True), (MemoryRecord(64), True), (MemoryRecord(65), False)],
)  # fmt: skip
def test_samples(record: Record, expected: bool) -> None:
    assert contains_multiple(record, 32) is expected

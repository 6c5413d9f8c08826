"""Counters of each route."""

from __future__ import annotations

import random

from ddpcheck.analysis.hardware.statistics import NodeSample, sample_from
from ddpcheck.analysis.network.model import MOST_INTERVALS, RouteCounterTable
from ddpcheck.records.node_kinds import SampleRecord, from_mapping

PAIR = "10.0.0.1 10.0.0.2"


def counters_of(samples: list[tuple[float, list[int]]]) -> RouteCounterTable:
    table = RouteCounterTable()
    for time, row in samples:
        table.add(sample_from(SampleRecord(time, connections={PAIR: row})))
    return table


def test_a_long_job_has_few_intervals_and_exact_totals() -> None:
    dice = random.Random(3)
    row, samples = [500, 40, 50, 1, 90, 2], []
    for second in range(5000):
        samples.append((float(second), list(row)))
        row[0] += dice.randrange(1000)
        row[1] += dice.randrange(100)
        row[3] += 1
    counters = counters_of(samples)[PAIR]
    assert MOST_INTERVALS // 2 <= len(counters.intervals) <= MOST_INTERVALS
    last = samples[-1][1]
    assert counters.bytes == sum(count for count, _ in counters.intervals) == last[0] - 500
    assert abs(sum(busy for _, busy in counters.intervals) - counters.busy_seconds) < 1e-6
    assert abs(counters.busy_seconds - (last[1] - 40) / 1e6) < 1e-9
    assert (counters.began, counters.ended, counters.retransmits, counters.min_rtt) == (0.0, 4999.0, 4999, 90)


def test_samples_without_connections_are_skipped() -> None:
    table = counters_of([(1.0, [100, 1, 1, 0, 9, 1]), (3.0, [300, 2, 2, 0, 9, 1])])
    table.add(NodeSample(time=4.0))
    assert (table[PAIR].bytes, table[PAIR].ended) == (200, 3.0)


def test_counters_that_decrease_are_ignored() -> None:
    counters = counters_of(
        [(1.0, [100, 9, 9, 0, 9, 1]), (2.0, [50, 5, 5, 0, 9, 1]), (3.0, [140, 10, 10, 0, 9, 1])]
    )[PAIR]
    assert (counters.bytes, counters.intervals) == (40, [(40, 1e-6)])


def test_rows_of_another_shape_are_left_out() -> None:
    for row in ([1, 2, 3], [1, 2, 3, 4, 5, -6], "x", None):
        record = from_mapping({"kind": "sample", "time": 1.0, "connections": {PAIR: row}})
        assert isinstance(record, SampleRecord)
        assert sample_from(record).connections == {}

"""Step times by rank, and clock offsets between hosts."""

from __future__ import annotations

from random import Random

import pytest

from ddpcheck.analysis.timing.collector import ClockOffsets
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.rank import RankHeader

MODULE = ((0, 1, 2, 3), 0)


def header(rank: int) -> RankHeader:
    return RankHeader(rank, 4, f"host{rank // 2}", 1, 1, "s", 0.0)


HERE = {rank: header(rank).host for rank in range(4)}


def clocks(steps: int, offset: float = 0.0, jitter: float = 0.001, late: int = -1) -> ClockOffsets:
    random = Random(0)
    offsets = ClockOffsets()
    for number in range(1, steps + 1):
        for rank in range(4):
            when = 1000.0 + number + random.expovariate(1 / jitter) + (offset if rank > 1 else 0.0)
            when += 5.0 if number == late and rank > 1 else 0.0
            record = BackwardRecord(number=number, step=number, local="", reduced="", root="", time=when)
            offsets.add(header(rank), MODULE, record)
    return offsets


@pytest.mark.parametrize("offset", [-3.0, 0.0, 0.25, 40.0])
def test_an_offset_is_estimated_within_its_uncertainty(offset: float) -> None:
    first, second = clocks(200, offset).hosts(HERE, {})
    assert (first.host, first.reference, first.offset) == ("host0", True, 0.0)
    assert (second.host, second.ranks, second.moments) == ("host1", (2, 3), 198)
    assert second.offset is not None
    assert second.uncertainty is not None
    assert abs(second.offset - offset) <= second.uncertainty < 0.002


def test_one_late_step_does_not_move_it() -> None:
    _, second = clocks(50, 0.5, late=20).hosts(HERE, {})
    assert second.offset == pytest.approx(0.5, abs=0.001)


def test_ends_may_lie_as_far_apart_as_ranks_wait() -> None:
    """Over a slow link one host always ends later, as if its clock were ahead."""
    offsets = clocks(200, offset=0.03)
    _, second = offsets.hosts(HERE, {}, {0: 0.002, 1: 0.15, 2: 0.12, 3: 0.1})
    assert second.offset == pytest.approx(0.03, abs=0.001)
    assert second.uncertainty == 0.1
    _, second = offsets.hosts(HERE, {}, {0: 0.0001, 1: 0.00005, 2: 0.0003})
    assert second.uncertainty is not None
    assert 0.0003 < second.uncertainty < 0.002


def test_too_few_steps_are_no_measure() -> None:
    _, second = clocks(3).hosts(HERE, {})
    assert (second.offset, second.uncertainty, second.moments) == (None, None, 1)


def test_one_host_has_nothing_to_be_compared_with() -> None:
    assert clocks(50).hosts({0: "host0", 1: "host0"}, {}) == ()


def test_hosts_whose_records_are_elsewhere_are_listed() -> None:
    first, second = ClockOffsets().hosts({0: "host0"}, {1: "host1"})
    assert (first.here, second.here, second.offset) == (True, False, None)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.analysis.timing.collector._MOST_OPEN", 16)
    monkeypatch.setattr("ddpcheck.analysis.timing.collector._MOST_KEPT", 32)
    offsets = clocks(2000, 0.5)
    assert len(offsets._open) <= 16
    _, second = offsets.hosts(HERE, {})
    assert 16 <= second.moments <= 33
    assert second.offset == pytest.approx(0.5, abs=0.002)

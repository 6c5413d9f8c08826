"""Growth, uneven memory and savings, and healthy jobs with varying memory that are not reported."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcheck.analysis.memory.collector import RankMemory, growth_of
from ddpcheck.analysis.memory.table import curve, savings_of
from ddpcheck.analysis.timeseries.series import MOST_POINTS, Series
from ddpcheck.records.kinds.memory import MemoryPartsRecord, MemoryRecord
from ddpcheck.records.kinds.modules import CommHookRecord, OptimizerRecord
from tests.helpers.run_builder import RunBuilder

MIB = 1 << 20
BASE = 600 * MIB


def series(value: Callable[[int], float], steps: int = 200) -> Series:
    values = Series()
    for step in range(steps):
        values.add(step, round(value(step)))
    return values


@pytest.mark.parametrize("steps", [60, 200, 5000])
def test_a_leak_is_measured(steps: int) -> None:
    growth = growth_of(series(lambda step: BASE + step * 2.5 * MIB, steps))
    assert growth is not None
    assert growth.per_step == pytest.approx(2.5 * MIB, rel=0.02)
    assert 0 < growth.first_step < growth.last_step < steps


def test_a_leak_in_a_noisy_job_is_detected() -> None:
    chance = random.Random(1)
    growth = growth_of(series(lambda step: BASE + step * 2 * MIB + chance.uniform(-30, 30) * MIB, 400))
    assert growth is not None
    assert growth.per_step == pytest.approx(2 * MIB, rel=0.1)


HEALTHY: dict[str, Callable[[int], float]] = {
    "flat": lambda step: BASE,
    "warm-up": lambda step: BASE + min(step, 12) * 40 * MIB,
    "slow warm-up": lambda step: BASE + 400 * MIB * (1 - math.exp(-step / 40)),
    "ever slower": lambda step: BASE + 100 * MIB * math.log1p(step),
    "a buffer that is full at last": lambda step: BASE + min(step, 188) * 4 * MIB,
    "one jump": lambda step: BASE + (step > 120) * 500 * MIB,
    "three jumps": lambda step: BASE + sum(step > at for at in (60, 110, 160)) * 100 * MIB,
    "saw": lambda step: BASE + step % 50 * 10 * MIB,
    "evaluation": lambda step: BASE + (step % 40 == 39) * 2000 * MIB,
    "small": lambda step: BASE + step * 0.3 * MIB,
    "small compared with the total": lambda step: 100 * BASE + step * MIB,
    "shrinks": lambda step: 2 * BASE - step * 2 * MIB,
}


@pytest.mark.parametrize("steps", [3, 10, 59, 200, 1000])
@pytest.mark.parametrize("name", HEALTHY)
def test_memory_of_a_healthy_job_is_not_a_leak(name: str, steps: int) -> None:
    scaled = steps / 200 if steps > 200 else 1.0
    assert growth_of(series(lambda step: HEALTHY[name](int(step / scaled)), steps)) is None


@pytest.mark.parametrize("seed", range(30))
def test_random_walks_and_growing_inputs_are_not_a_leak(seed: int) -> None:
    """Memory that follows the longest input so far grows more and more slowly; noise may go in any direction."""
    chance = random.Random(seed)
    longest, walk, held = 0.0, 0.0, Series()
    for step in range(chance.choice([30, 80, 300])):
        longest = max(longest, chance.gauss(0, 1))
        walk += chance.gauss(0, 1)
        held.add(step, round(BASE + 50 * MIB * longest + 2 * MIB * walk + chance.gauss(0, 5) * MIB))
    assert growth_of(held) is None


def test_a_series_is_bounded_and_keeps_its_shape() -> None:
    long = series(lambda step: step * MIB, 50_000)
    assert len(long) <= MOST_POINTS
    assert long.median(10_000, 20_000) == pytest.approx(15_000 * MIB, rel=0.02)
    points = curve(long)
    assert len(points) == 64
    assert (points[0], points[-1][0]) == ([0, 0], long.steps[-1])


def test_a_value_holds_until_the_next() -> None:
    values = Series()
    for step, value in ((0, 5), (10, 7), (10, 9), (3, 9)):
        values.add(step, value)
    assert [values.at(step) for step in (-1, 0, 9, 10, 99)] == [5, 5, 5, 7, 7]


def job(
    folder: Path, host: Callable[[int, int], int], steps: int = 80, world_size: int = 2, **parts: int
) -> RunBuilder:
    """Ranks whose memory after each step is `host(rank, step)`."""
    build = RunBuilder(folder, world_size).wrap().optimizer().train(2)
    for rank in range(world_size):
        if parts:
            build.add(rank, MemoryPartsRecord(0, 0, 1, **parts))  # type: ignore[arg-type]
        for step in range(steps):
            build.add(rank, MemoryRecord(step, host(rank, step), host(rank, step)))
    return build.end()


def test_ddp501_growing_on_one_rank(tmp_path: Path) -> None:
    finding = job(tmp_path, lambda rank, step: BASE + rank * step * 2 * MIB).only("DDP501")
    assert (finding.severity.value, finding.ranks) == ("warning", (1,))
    assert finding.evidence["bytes_a_step"] == {"1": 2 * MIB}
    assert "Memory of rank 1 grows steadily, by 2.1 MB per step" in finding.message


def test_ddp501_uneven(tmp_path: Path) -> None:
    finding = job(tmp_path, lambda rank, step: BASE * (1 + (rank == 2)), world_size=4).only("DDP501")
    assert finding.ranks == (2,)
    assert finding.evidence["bytes"] == {"0": BASE, "1": BASE, "2": 2 * BASE, "3": BASE}
    assert "629.1 MB more" in finding.message


@pytest.mark.parametrize(
    "host",
    [
        lambda rank, step: BASE + rank * 400 * MIB,  # much, but not on a host
        lambda rank, step: 100 * BASE + rank * 1000 * MIB,  # little compared with the total
        lambda rank, step: BASE + (rank == 1 and step < 30) * 2000 * MIB,  # only at the start
    ],
)
def test_ddp501_what_is_not_uneven(tmp_path: Path, host: Callable[[int, int], int]) -> None:
    assert job(tmp_path, host).findings("DDP501") == []


def test_ddp501_is_silent_about_a_short_job(tmp_path: Path) -> None:
    assert job(tmp_path, lambda rank, step: BASE + (rank + step) * 100 * MIB, steps=10).findings() == []


def test_ddp501_names_the_part_that_differs(tmp_path: Path) -> None:
    build = job(tmp_path, lambda rank, step: BASE + rank * 700 * MIB)
    for rank in range(2):
        build.add(rank, MemoryPartsRecord(0, 0, 1, state=rank * 690 * MIB))
    finding = build.only("DDP501")
    assert finding.evidence["part"] == "optimizer state"


def test_ddp501_ignores_sharded_state(tmp_path: Path) -> None:
    build = job(tmp_path, lambda rank, step: BASE + rank * 700 * MIB)
    for rank in range(2):
        build.add(rank, OptimizerRecord(0, "ZeroRedundancyOptimizer", 0, [[0]]))
        build.add(rank, MemoryPartsRecord(0, 0, 1, state=rank * 690 * MIB))
    assert build.findings("DDP501") == []


def test_ddp501_on_a_device(tmp_path: Path) -> None:
    """On a device torch's figures count, and smaller differences are reported."""
    build = RunBuilder(tmp_path, 2).wrap().train(2)
    for rank in range(2):
        for step in range(30):
            allocated = BASE + rank * 300 * MIB
            build.add(rank, MemoryRecord(step, BASE + step * 50 * MIB, 0, allocated, 2 * BASE, 3 * BASE))
    report = build.end().report()
    assert [(finding.code, finding.ranks) for finding in report.findings] == [("DDP501", (1,))]
    assert report.memory is not None
    row = report.memory["ranks"][1]
    assert (row["measured"], row["after_step"], row["most"]) == ("allocated", BASE + 300 * MIB, 3 * BASE)
    assert row["reserved"] == 2 * BASE


def test_ddp501_a_rank_on_a_device_that_is_not_its_own(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().train(2)
    for rank in range(3):
        elsewhere = {"cuda:0": 500 * MIB} if rank else {}
        build.add(rank, MemoryPartsRecord(0, 0, 1, device=f"cuda:{rank}", elsewhere=elsewhere))
    finding = build.end().only("DDP501")
    assert finding.ranks == (1, 2)
    assert "Rank 1 holds 524.3 MB on cuda:0, which is not its own device (cuda:1)" in finding.message
    assert "map_location" in finding.fix


SIZES = {"parameters": 200 * MIB, "gradients": 200 * MIB, "buckets": 200 * MIB, "state": 400 * MIB}


def test_ddp502_what_would_be_saved(tmp_path: Path) -> None:
    build = job(tmp_path, lambda rank, step: 4 * BASE, world_size=4, kept=199 * MIB, **SIZES)
    (finding,) = build.findings()
    assert (finding.code, finding.severity.value) == ("DDP502", "note")
    assert finding.evidence["savings"] == [
        {"option": "ZeroRedundancyOptimizer", "bytes": 300 * MIB},
        {"option": "gradient_as_bucket_view=True", "bytes": 200 * MIB},
        {"option": "set_to_none=True", "bytes": 199 * MIB},
    ]


def test_ddp502_a_communication_hook_of_the_user(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(1)
    for rank in range(2):
        build.add(rank, CommHookRecord(0, "mine", 0))
        build.add(rank, MemoryPartsRecord(0, 0, 1, gradients=200 * MIB, buckets=200 * MIB))
        build.add(rank, MemoryRecord(1, BASE, BASE))
    assert build.end().findings("DDP502") == []


def memory(**parts: int | bool) -> RankMemory:
    held = RankMemory()
    held.add(MemoryRecord(1, BASE, BASE))
    held.parts[((0, 1), 0), 0] = MemoryPartsRecord(0, 0, 1, **parts)  # type: ignore[arg-type]
    return held


def test_no_saving_where_there_is_none() -> None:
    assert savings_of(memory(views=True, buckets=200 * MIB, gradients=0), 2, False, False) == []
    assert savings_of(memory(gradients=60 * MIB, buckets=60 * MIB), 2, False, False) == []
    assert savings_of(memory(gradients=200 * MIB, buckets=200 * MIB), 1, False, False) == []
    assert savings_of(memory(state=400 * MIB), 2, True, False) == []
    assert savings_of(memory(gradients=200 * MIB, kept=9 * MIB), 1, False, False) == []


def test_the_row_adds_up(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(1)
    for rank in range(2):
        sizes = {**SIZES, "base": 50 * MIB}
        build.add(rank, MemoryPartsRecord(0, 0, 1, **sizes))
        for step in range(10):
            build.add(rank, MemoryRecord(step, 1050 * MIB, 900 * MIB))
    report = build.end().report()
    assert report.memory is not None
    row = report.memory["ranks"][0]
    # As the backward begins: before + weights + buckets + state + activations.
    assert row["rest"] == (900 - 50 - 200 - 200 - 400) * MIB
    assert (row["most"], row["growth"], row["measured"]) == (1050 * MIB, None, "resident")


def test_two_optimizers_share_the_weights() -> None:
    held = RankMemory()
    for optimizer in range(2):
        record = MemoryPartsRecord(0, optimizer, 1, parameters=10, state=5)
        held.parts[((0, 1), 0), optimizer] = record
    assert (held.part("parameters"), held.part("state")) == (10, 10)


def test_a_damaged_record_does_not_stop_the_series() -> None:
    series = Series()
    for step, value in ((0, 10), (1, 1 << 80), (2, 12)):
        series.add(step, value)
    assert list(series) == [(0, 10), (2, 12)]

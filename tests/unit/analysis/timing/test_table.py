"""Time tables and stragglers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.timing.collector import MOST_STEPS, StepTimeSeries
from ddpcheck.analysis.timing.model import RankTime, Refaults, Spent, TimeTable
from ddpcheck.analysis.timing.table import faults_memory_in, lacks_processors, refaults_in, time_tables
from ddpcheck.records.kinds.timing import ClockRecord
from tests.helpers.run_builder import RunBuilder


def row(rank: int, faults: int | None, kernel_us: int | None, step_us: int = 12_000) -> RankTime:
    spent = Spent(step_us, step_us, step_us, 1.0)
    return RankTime(rank, spent, {}, 0, 0, faults=faults, kernel_us=kernel_us)


def test_the_rank_that_loses_most_is_reported() -> None:
    rows = [row(0, 1_000, 2_400), row(1, 2_500, 6_000), row(2, 9_000, 100)]
    assert refaults_in(rows) == Refaults(rank=1, faults=2_500, share=0.5)


@pytest.mark.parametrize(
    ("faults", "kernel_us"),
    [(2_500, 1_000), (100, 6_000), (None, None)],
    ids=["little", "something else", "not known"],
)
def test_nothing_worth_reporting(faults: int | None, kernel_us: int | None) -> None:
    assert refaults_in([row(0, 2_000, 600), row(1, faults, kernel_us)]) is None


def test_without_steps_nothing_is_reported() -> None:
    assert refaults_in([row(0, 10, 10, step_us=0)]) is None


# Microseconds of each part on every rank, unless a test says otherwise.
USUAL = {"data": 1_000, "forward": 20_000, "backward": 25_000, "optimizer": 2_000, "other": 2_000}
TRANSFER = 3_000
Parts = Mapping[str, int]


def clocks(
    world_size: int,
    steps: int = 40,
    more: Callable[[int, int], Parts] = lambda rank, step: {},
    queued: Callable[[int], int] = lambda rank: 100,
    faulted: Callable[[int], tuple[int, int]] | None = None,
    noise: int = 0,
) -> dict[int, StepTimeSeries]:
    """Ranks that meet once in a step: each waits for the last to arrive and for the transfer."""
    draw = random.Random(1)
    series = {rank: StepTimeSeries() for rank in range(world_size)}
    for step in range(steps):
        parts = {
            rank: {
                name: USUAL[name] + more(rank, step).get(name, 0) + draw.randint(0, noise) for name in USUAL
            }
            for rank in series
        }
        longest = max(sum(own.values()) for own in parts.values())
        for rank, clock in series.items():
            own = dict(parts[rank])
            wait = longest - sum(own.values()) + TRANSFER
            del own["other"]
            columns: dict[str, Any] = {name: [value] for name, value in own.items()}
            total = [longest + TRANSFER]
            if faulted is not None:
                columns["faults"], columns["kernel"] = ([value] for value in faulted(rank))
            clock.add(
                ClockRecord(step, total=total, wait=[wait], watching=[50], queued=[queued(rank)], **columns)
            )
    return series


def table(series: dict[int, StepTimeSeries]) -> TimeTable:
    [only] = time_tables(series, [tuple(series)])
    return only


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("part", list(USUAL))
def test_a_rank_that_is_late_in_one_part(world_size: int, part: str) -> None:
    late = table(clocks(world_size, more=lambda rank, _: {part: 10_000} if rank == 1 else {})).straggler
    assert late is not None
    assert (late.ranks, late.part, late.cost_us) == ((1,), part, 10_000)
    assert (late.own_us, late.others_us) == (USUAL[part] + 10_000, USUAL[part])
    assert late.steps_late == 35


def test_two_of_four_ranks_are_late() -> None:
    late = table(clocks(4, more=lambda rank, _: {"data": 9_000} if rank > 1 else {})).straggler
    assert late is not None
    assert (late.ranks, late.part) == ((2, 3), "data")


@pytest.mark.parametrize("world_size", [2, 4])
def test_even_ranks_with_noise_have_no_straggler(world_size: int) -> None:
    assert table(clocks(world_size, steps=200, noise=8_000)).straggler is None


def test_ranks_that_are_late_in_turn_are_not_stragglers() -> None:
    series = clocks(4, more=lambda rank, step: {"forward": 15_000} if step % 4 == rank else {})
    assert table(series).straggler is None


def test_a_rank_that_was_late_for_a_while_is_not_a_straggler() -> None:
    series = clocks(2, more=lambda rank, step: {"forward": 15_000} if rank == 1 and step < 30 else {})
    assert table(series).straggler is None


def test_a_small_delay_is_not_reported() -> None:
    assert table(clocks(2, more=lambda rank, _: {"forward": 1_900 * rank})).straggler is None
    assert table(clocks(2, more=lambda rank, _: {"forward": 3_500 * rank})).straggler is not None


def test_a_short_job_is_not_evaluated() -> None:
    assert time_tables(clocks(2, steps=24), [(0, 1)]) == ()
    quick = clocks(2, steps=30, more=lambda rank, _: {"forward": 4_000 * rank, "backward": -24_000})
    # Less than a second in all.
    assert table(quick).straggler is None


def test_waiting_without_extra_work_is_not_a_straggler() -> None:
    """For example because the backend always serves one rank first."""
    series = clocks(2, steps=0)
    for step in range(60):
        for rank, clock in series.items():
            wait = 20_000 if rank else 5_000
            columns: dict[str, Any] = {name: [USUAL[name]] for name in USUAL if name != "other"}
            clock.add(ClockRecord(step, total=[80_000], wait=[wait], watching=[0], queued=[0], **columns))
    # The rank that waits less has more time in `other`, but no rank waited for that.
    late = table(series).straggler
    assert late is None or late.part == "other"


def test_a_busy_host_is_distinguished_from_a_slow_rank() -> None:
    slow = lambda rank, _: {"forward": 10_000 * rank}  # noqa: E731
    alone = table(clocks(2, more=slow)).straggler
    crowded = table(clocks(2, more=slow, queued=lambda rank: 9_000 * rank)).straggler
    unknown = table(clocks(2, more=slow, queued=lambda rank: -1)).straggler
    assert alone is not None
    assert crowded is not None
    assert unknown is not None
    assert [lacks_processors(late) for late in (alone, crowded, unknown)] == [False, True, False]
    assert unknown.queued_us is None


def test_refaults_are_distinguished_from_a_slow_rank() -> None:
    slow = lambda rank, _: {"forward": 10_000 * rank}  # noqa: E731
    given_back = table(clocks(2, more=slow, faulted=lambda rank: (10 + 5_000 * rank, 400 + 9_000 * rank)))
    # The kernel was busy with something else, or not for long enough.
    reading = table(clocks(2, more=slow, faulted=lambda rank: (10 + 100 * rank, 400 + 9_000 * rank)))
    few = table(clocks(2, more=slow, faulted=lambda rank: (10 + 5_000 * rank, 400 + 3_000 * rank)))
    unknown = table(clocks(2, more=slow, faulted=lambda rank: (-1, -1)))
    old = table(clocks(2, more=slow))
    late = [each.straggler for each in (given_back, reading, few, unknown, old)]
    assert [each is not None and faults_memory_in(each) for each in late] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert [(each.faults, each.kernel_us) for each in late[2:] if each is not None] == [
        (5_000, 3_000),
        (None, None),
        (None, None),
    ]
    assert [(row.faults, row.kernel_us) for row in given_back.ranks] == [(10, 400), (5_010, 9_400)]
    assert old.ranks[0].faults is None


def test_columns_of_another_length_are_not_used() -> None:
    clock = StepTimeSeries()
    columns: dict[str, Any] = {name: [USUAL[name]] * 2 for name in USUAL if name != "other"}
    clock.add(
        ClockRecord(0, total=[1] * 2, wait=[0] * 2, watching=[0] * 2, queued=[0] * 2, faults=[1], **columns)
    )
    assert not clock.steps


def test_scaling_of_even_ranks() -> None:
    scaling = table(clocks(4)).scaling
    busy = sum(USUAL.values())
    assert scaling.efficiency == round(busy / (busy + TRANSFER), 4)
    assert scaling.speed_up == pytest.approx(4 * busy / (busy + TRANSFER), abs=1e-3)
    assert scaling.exposed_communication == round(TRANSFER / (busy + TRANSFER), 4)
    assert scaling.waiting_for_stragglers == 0


def test_scaling_with_a_late_rank() -> None:
    scaling = table(clocks(2, more=lambda rank, _: {"data": 10_000 * rank})).scaling
    step = sum(USUAL.values()) + 10_000 + TRANSFER
    assert scaling.waiting_for_stragglers == round(5_000 / step, 4)
    assert scaling.data == round(6_000 / step, 4)
    shares = [
        scaling.compute,
        scaling.data,
        scaling.other,
        scaling.exposed_communication,
        scaling.waiting_for_stragglers,
    ]
    assert sum(shares) == pytest.approx(1, abs=1e-3)


def test_phases_of_a_rank_add_up_to_its_step() -> None:
    row = table(clocks(2, noise=3_000)).ranks[0]
    assert sum(part.mean_us for part in row.parts.values()) == pytest.approx(row.step.mean_us, abs=3)
    assert row.parts["forward"].p90_us >= row.parts["forward"].median_us


def test_pauses_are_left_out() -> None:
    series = clocks(2, more=lambda rank, step: {"other": 500_000} if step % 10 == 0 and rank == 0 else {})
    result = table(series)
    assert result.pauses == 3
    assert result.ranks[0].parts["other"].mean_us == USUAL["other"]
    assert result.straggler is None


def test_a_long_run_is_downsampled_alike_on_all_ranks() -> None:
    series = clocks(2, steps=3 * MOST_STEPS)
    assert [len(clock.steps) <= MOST_STEPS for clock in series.values()] == [True, True]
    result = table(series)
    assert result.every == 4
    assert result.ranks[0].parts["forward"].median_us == USUAL["forward"]


def test_device_times_replace_host_times() -> None:
    clock = StepTimeSeries()
    device = {
        "total": [60_000],
        "forward": [20_000],
        "backward": [25_000],
        "wait": [5_000],
        "optimizer": [4_000],
    }
    host = ClockRecord(
        0,
        total=[60_000],
        data=[9_000],
        forward=[900],
        backward=[700],
        wait=[1],
        optimizer=[80],
        watching=[5],
        queued=[0],
        device=device,
    )
    clock.add(host)
    held = {name: column[0] for name, column in clock.columns.items()}
    # Six milliseconds in which the device had nothing to do, and the host was waiting for data.
    assert (held["forward"], held["wait"], held["data"], held["other"]) == (20_000, 5_000, 6_000, 0)
    clock.add(replace(host, step=1, device={name: [-1] for name in device}))
    assert list(clock.steps) == [0]


def test_columns_of_unequal_length_are_skipped() -> None:
    clock = StepTimeSeries()
    clock.add(ClockRecord(0, total=[5, 6], data=[1]))
    assert list(clock.steps) == []


def test_the_clock_that_ddp_has_of_its_own() -> None:
    series = clocks(2, more=lambda rank, _: {"forward": 10_000 * rank})
    assert table(series).cross_check is None
    series[0].add(ClockRecord(0, ddp={"communication": 12_500, "overlap": 100}))
    assert table(series).cross_check is None
    # Nothing of it was hidden: DDP then has no average.
    series[1].add(ClockRecord(0, ddp={"communication": 3_600}))
    check = table(series).cross_check
    assert check is not None
    assert (check.wait_us, check.ddp_wait_us) == (TRANSFER + 5_000, (12_400 + 3_600) // 2)
    assert table(series).ranks[0].ddp_us == {"communication": 12_500, "overlap": 100}


def test_a_group_with_a_rank_without_records_has_no_table() -> None:
    assert time_tables(clocks(2), [(0, 1, 2)]) == ()


def add_clocks(build: RunBuilder, series: dict[int, StepTimeSeries]) -> RunBuilder:
    """The same clocks, as records."""
    for rank, clock in series.items():
        names = ("total", "data", "forward", "backward", "wait", "optimizer", "watching", "queued")
        columns: dict[str, Any] = {name: list(clock.columns[name]) for name in names}
        build.add(rank, ClockRecord(0, **columns))
    return build


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp402(tmp_path: Path, world_size: int) -> None:
    series = clocks(world_size, more=lambda rank, _: {"data": 10_000} if rank == 1 else {})
    build = RunBuilder(tmp_path, world_size).wrap().train(40)
    finding = add_clocks(build, series).end().only("DDP402")
    assert (finding.severity.value, finding.ranks, finding.stage) == ("warning", (1,), "data")
    assert finding.message == (
        "Rank 1 is a straggler: it costs 10.0 ms per step. That is 16 % of 63.0 ms, in 35 of 35 steps. "
        "It spends 11.0 ms waiting for data, the other ranks 1.0 ms."
    )
    assert "workers" in finding.fix


def test_ddp402_is_a_note_without_enough_processors(tmp_path: Path) -> None:
    series = clocks(2, more=lambda rank, _: {"forward": 10_000 * rank}, queued=lambda rank: 9_000 * rank)
    build = add_clocks(RunBuilder(tmp_path, 2).wrap().train(40), series).end()
    [finding] = build.findings("DDP402")
    assert finding.severity.value == "note"
    assert "processor" in finding.cause


def test_nothing_is_reported_for_even_ranks(tmp_path: Path) -> None:
    build = add_clocks(RunBuilder(tmp_path, 2).wrap().train(40), clocks(2, noise=4_000)).end()
    assert build.findings("DDP402") == []
    [result] = build.report().time
    assert (result.group, result.steps, result.first_step, result.last_step) == ((0, 1), 35, 5, 39)

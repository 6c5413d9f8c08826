"""Collectives matched across ranks, and exposed communication."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.collectives import Exposure, exposures
from ddpcheck.traces.reader import load
from tests.helpers.trace_builder import Event, all_reduce, described, kernel, span, step, write


def rank_events(arrives: float, *more: Event) -> list[Event]:
    """Compute from 10 to 50, a reduction from `arrives` to 80; half of it hidden if it came at 20."""
    return [
        step(3, 0, 100),
        *kernel("gemm", 10, 50, launched=5),
        *all_reduce(arrives, 80, launched=8, **described(1000)),
        *more,
    ]


def exposures_of(tmp_path: Path, *ranks: list[Event]) -> list[Exposure]:
    for rank, events in enumerate(ranks):
        write(tmp_path / f"rank{rank}.json", events, rank=rank)
    traces = load([tmp_path]).traces
    return exposures(traces, analyse(traces))


def test_time_before_the_last_arrival_is_waiting(tmp_path: Path) -> None:
    early, late = exposures_of(tmp_path, rank_events(20), rank_events(60))
    # Rank 0: waits from 20 to 60, of which compute hides 20 to 50; then 20 of transfer, all exposed.
    assert (early.transfer_ns, early.wait_ns) == (20_000, 10_000)
    assert (late.transfer_ns, late.wait_ns) == (20_000, 0)
    assert {early.took_ns, late.took_ns} == {100_000}
    assert {early.step, late.step} == {3}


def test_transfers_behind_compute_cost_nothing(tmp_path: Path) -> None:
    one, other = exposures_of(tmp_path, rank_events(30), rank_events(30))
    assert (one.transfer_ns, other.transfer_ns) == (30_000, 30_000)


def test_ddpchecks_work_is_neither_compute_nor_part_of_the_step(tmp_path: Path) -> None:
    own = span("user_annotation", "ddpcheck", 55, 75)
    digest = kernel("digest_kernel", 60, 70, launched=57)
    plain, marked = exposures_of(tmp_path, rank_events(20), rank_events(20, own, *digest))
    # The digest's kernel ran beside the transfer, and still hides nothing of it.
    assert (plain.transfer_ns, marked.transfer_ns) == (30_000, 30_000)
    assert (plain.took_ns, marked.took_ns) == (100_000, 80_000)


def test_ddpchecks_cpu_operations_are_not_compute(tmp_path: Path) -> None:
    def events(*more: Event) -> list[Event]:
        return [
            step(1, 0, 100),
            span("cpu_op", "aten::mm", 10, 40),
            span("user_annotation", "gloo:all_reduce", 30, 90, tid=9),
            *more,
        ]

    own = [span("user_annotation", "ddpcheck", 50, 70), span("cpu_op", "aten::sum", 52, 68)]
    plain, marked = exposures_of(tmp_path, events(), events(*own))
    assert plain.transfer_ns == marked.transfer_ns == 50_000


def test_one_rank_alone_shows_neither(tmp_path: Path) -> None:
    [alone] = exposures_of(tmp_path, rank_events(20))
    assert (alone.transfer_ns, alone.wait_ns) == (0, 0)

"""Exposed communication, split into transfer and waiting for the last rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.traces.alignment import on_one_clock
from ddpcheck.traces.intervals import Cover, Interval
from ddpcheck.traces.model import Part, TraceResult
from ddpcheck.traces.rank_trace import RankTrace


@dataclass(frozen=True)
class Exposure:
    """One step of one rank, from collectives matched across ranks."""

    rank: int
    step: int
    # Duration of the step, without ddpcheck's own work.
    took_ns: int
    # Without concurrent compute: transfers, and waiting without concurrent transfer.
    transfer_ns: int
    wait_ns: int


def exposures(traces: Sequence[RankTrace], result: TraceResult) -> list[Exposure]:
    """Every marked step on every rank."""
    aligned = on_one_clock(traces, {rank.rank: rank.clock for rank in result.ranks})
    exposures: list[Exposure] = []
    for trace in aligned:
        compute = Cover((start, end) for start, end, _ in trace.compute)
        own = Cover(trace.own)
        parts = _by_step(trace.rank, result)
        for step in trace.steps:
            took = step.end - step.start - own.within(step.start, step.end)
            shares = _exposed(parts.get(step.number, []), compute, result.origin_ns)
            exposures.append(Exposure(trace.rank, step.number, took, *shares))
    return exposures


def _by_step(rank: int, result: TraceResult) -> dict[int | None, list[Part]]:
    parts: dict[int | None, list[Part]] = {}
    for collective in result.collectives:
        for part in collective.parts:
            if part.rank == rank and part.wait_ns is not None:
                parts.setdefault(collective.step, []).append(part)
    return parts


def _exposed(parts: Iterable[Part], compute: Cover, origin: int) -> tuple[int, int]:
    waits: list[Interval] = []
    transfers: list[Interval] = []
    for part in parts:
        start, end = part.start_ns + origin, part.end_ns + origin
        arrived = min(start + (part.wait_ns or 0), end)
        waits.append((start, arrived))
        transfers.append((arrived, end))
    transfer = Cover(transfers)
    return transfer.without(compute).length, Cover(waits).without(transfer).without(compute).length

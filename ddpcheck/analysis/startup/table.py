"""The start-up as reports show it: one row a rank, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.startup.collector import StartupCollector
from ddpcheck.analysis.startup.scenario import (
    NodeReads,
    readers_of,
    reads_by_node,
    repeated_bytes,
    scenario_of,
    told,
    told_by_node,
)
from ddpcheck.analysis.startup.timeline import RankTimeline, timeline
from ddpcheck.records.kinds.digests import Stage, TensorKind

MOST_RANKS = 256


class StartupTable(TypedDict):
    """What report.json holds under `startup`."""

    # "every rank reads", "one rank reads", "some ranks read", "built in code"; null: not known.
    scenario: str | None
    summary: str
    # Whether all parameters were equal on all ranks before DDP broadcast them; null: not compared.
    equal_before: bool | None
    # Of all ranks: bytes loaded, of them from storage, and what was read by more than one rank.
    loaded_bytes: int
    storage_bytes: int
    repeated_bytes: int
    # The broadcast on wrapping, of the rank that waited for nobody; bytes a second only where the weights lie in
    # the host's memory: on a device the call returns before the work is done.
    broadcast_bytes: int
    broadcast_seconds: float | None
    broadcast_rate: float | None
    copied_bytes: int
    copy_rate: float | None
    nodes: list[NodeReads]
    # All, or of very many those that took the longest.
    ranks: list[RankTimeline]
    of: int


def startup_table(attempt: Attempt) -> StartupTable | None:
    """None where ranks said nothing of their start."""
    seen = attempt.collector(StartupCollector).ranks
    rows = [
        timeline(rank, attempt.ranks[rank].header.host, records) for rank, records in sorted(seen.items())
    ]
    if not rows:
        return None
    equal = _equal_before(attempt)
    nodes = reads_by_node(rows)
    scenario = scenario_of(rows)
    broadcasts = [row["broadcast"] for row in rows if row["broadcast"] is not None]
    seconds = min(broadcasts, default=None)
    size = max((row["broadcast_bytes"] for row in rows), default=0)
    on_device = any(row["device_memory"] for row in rows)
    return StartupTable(
        scenario=None if scenario is None else scenario.value,
        summary=" ".join(filter(None, (told(rows, equal), told_by_node(nodes)))),
        equal_before=equal,
        loaded_bytes=sum(row["loaded_bytes"] for row in readers_of(rows)),
        storage_bytes=sum(row["storage_bytes"] for row in readers_of(rows)),
        repeated_bytes=repeated_bytes(rows),
        broadcast_bytes=size,
        broadcast_seconds=seconds,
        broadcast_rate=None if on_device else _rate(size, seconds),
        copied_bytes=sum(row["copied_bytes"] for row in rows),
        copy_rate=_copy_rate(rows),
        nodes=nodes,
        ranks=_slowest(rows),
        of=len(rows),
    )


def _slowest(rows: list[RankTimeline]) -> list[RankTimeline]:
    ordered = sorted(rows, key=lambda row: (-(row["total"] or 0.0), row["rank"]))
    return sorted(ordered[:MOST_RANKS], key=lambda row: row["rank"])


def _equal_before(attempt: Attempt) -> bool | None:
    """Of all modules that have anyone to be equal to."""
    tallies = [
        attempt.agreement.stats_of(module, Stage.INIT_BEFORE, TensorKind.PARAMETERS)
        for module in attempt.modules()
        if len(module[0]) > 1
    ]
    compared = [tally for tally in tallies if tally.compared]
    return all(tally.first is None for tally in compared) if compared else None


def _copy_rate(rows: Sequence[RankTimeline]) -> float | None:
    """The slowest rank's."""
    rates = [_rate(row["copied_bytes"], row["copy"]) for row in rows if row["copied_bytes"]]
    return min((rate for rate in rates if rate is not None), default=None)


def _rate(size: int, seconds: float | None) -> float | None:
    return round(size / seconds) if size and seconds else None

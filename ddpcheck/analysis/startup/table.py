"""The start-up table: one row per rank, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.startup.collector import StartupCollector
from ddpcheck.analysis.startup.scenario import (
    NodeReads,
    node_summary,
    readers_of,
    reads_by_node,
    repeated_bytes,
    scenario_of,
    scenario_summary,
)
from ddpcheck.analysis.startup.timeline import RankTimeline, timeline
from ddpcheck.records.kinds.digests import Stage, TensorKind

MOST_RANKS = 256


class StartupTable(TypedDict):
    """The contents of `startup` in report.json."""

    # "every rank reads", "one rank reads", "some ranks read", "built in code"; null: not known.
    scenario: str | None
    summary: str
    # Whether all parameters were equal on all ranks before DDP broadcast them; null: not compared.
    equal_before: bool | None
    # Over all ranks: bytes loaded; of these, bytes from storage; and bytes that several ranks read.
    loaded_bytes: int
    storage_bytes: int
    repeated_bytes: int
    # The broadcast at wrapping, of the rank that waited for no other. The rate in bytes per second only for weights in
    # host memory: on a device the call returns before the broadcast is complete.
    broadcast_bytes: int
    broadcast_seconds: float | None
    broadcast_rate: float | None
    copied_bytes: int
    copy_rate: float | None
    nodes: list[NodeReads]
    # All ranks; the slowest ranks of very large jobs.
    ranks: list[RankTimeline]
    of: int


def startup_table(attempt: Attempt) -> StartupTable | None:
    """None where ranks recorded no start-up."""
    records_of = attempt.collector(StartupCollector).ranks
    rows = [
        timeline(rank, attempt.ranks[rank].header.host, records)
        for rank, records in sorted(records_of.items())
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
        summary=" ".join(filter(None, (scenario_summary(rows, equal), node_summary(nodes)))),
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
    """Over all modules with several ranks."""
    comparisons = [
        attempt.agreement.stats_of(module, Stage.INIT_BEFORE, TensorKind.PARAMETERS)
        for module in attempt.modules()
        if len(module[0]) > 1
    ]
    compared = [stats for stats in comparisons if stats.compared]
    return all(stats.first is None for stats in compared) if compared else None


def _copy_rate(rows: Sequence[RankTimeline]) -> float | None:
    """The rate of the slowest rank."""
    rates = [_rate(row["copied_bytes"], row["copy"]) for row in rows if row["copied_bytes"]]
    return min((rate for rate in rates if rate is not None), default=None)


def _rate(size: int, seconds: float | None) -> float | None:
    return round(size / seconds) if size and seconds else None

"""The start-up table: one row per rank, the kind of start-up, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypedDict

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.startup.collector import LEAST_BYTES, RankTimeline, StartupCollector, timeline
from ddpcheck.formatting import seconds_text, size_text
from ddpcheck.records.kinds.digests import Stage, TensorKind

# A rank that loaded less than this share of the broadcast bytes did not load the weights.
LEAST_WEIGHTS_SHARE = 0.1


class Scenario(str, Enum):
    """Where the weights came from."""

    ALL_READ = "every rank reads"
    ONE_READS = "one rank reads"
    SOME_READ = "some ranks read"
    BUILT = "built in code"


def scenario_of(rows: Sequence[RankTimeline]) -> Scenario | None:
    """None where no rank reached the broadcast."""
    if not rows or not any(row["wrap"] is not None for row in rows):
        return None
    readers = readers_of(rows)
    if not readers:
        return Scenario.BUILT
    if len(readers) == len(rows):
        return Scenario.ALL_READ
    return Scenario.ONE_READS if len(readers) == 1 else Scenario.SOME_READ


def readers_of(rows: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Ranks that loaded enough bytes to be the weights."""
    weights = max((row["broadcast_bytes"] for row in rows), default=0)
    least = max(min(LEAST_BYTES, weights), LEAST_WEIGHTS_SHARE * weights, 1)
    return [row for row in rows if row["loaded_bytes"] >= least]


def repeated_bytes(rows: Sequence[RankTimeline]) -> int:
    """Bytes that were read more than once. Reading once and broadcasting avoids them."""
    sizes: dict[str, list[int]] = {}
    for row in rows:
        for file in row["files"]:
            sizes.setdefault(file["path"], []).append(file["bytes"])
    return sum(sum(each) - max(each) for each in sizes.values())


def scenario_summary(rows: Sequence[RankTimeline], equal_before: bool | None) -> str:
    """The scenario in one or two sentences, with numbers."""
    scenario = scenario_of(rows)
    readers = readers_of(rows)
    match scenario:
        case None:
            return ""
        case Scenario.BUILT:
            return f"No rank read weights from a file: the model was built in code. {_before(equal_before)}"
        case Scenario.ONE_READS:
            return _one_reads(readers[0], rows)
        case _:
            return _several_read(readers, rows)


def _before(equal_before: bool | None) -> str:
    if equal_before is None:
        return "Ranks were not compared before the broadcast."
    if equal_before:
        return "Ranks were equal before the broadcast, as with the same seed."
    return "Ranks differed before the broadcast, and were equal after it."


def _one_reads(reader: RankTimeline, rows: Sequence[RankTimeline]) -> str:
    others = [row["waited"] or 0.0 for row in rows if row is not reader]
    return (
        f"Only rank {reader['rank']} read {size_text(reader['loaded_bytes'])} "
        f"({_source([reader])}) in {seconds_text(reader['load'] or 0.0)}; the others received it by broadcast "
        f"and waited up to {seconds_text(max(others, default=0.0))} for it in DDP's constructor."
    )


def _several_read(readers: Sequence[RankTimeline], rows: Sequence[RankTimeline]) -> str:
    total = sum(row["loaded_bytes"] for row in readers)
    repeated = repeated_bytes(rows)
    text = (
        f"{len(readers)} ranks read {size_text(total)} ({_source(readers)}), the slowest in "
        f"{seconds_text(max(row['load'] or 0.0 for row in readers))}."
    )
    if repeated:
        text += (
            f" {size_text(repeated)} of it were files that several ranks read: reading once and "
            "broadcasting would save that. DDP broadcasts the weights at wrapping in any case."
        )
    return text


def _source(readers: Sequence[RankTimeline]) -> str:
    if all(row["direct"] for row in readers):
        return "directly to the device, without a copy in host memory"
    total = sum(row["loaded_bytes"] for row in readers)
    storage = min(total, sum(row["storage_bytes"] for row in readers))
    if storage <= 0.1 * total:
        return "all from the page cache" if storage < 0.01 * total else "nearly all from the page cache"
    if storage >= 0.9 * total:
        return "from storage"
    return f"{size_text(storage)} from storage, the rest from the page cache"


MOST_NODES = 4
# Smaller shares of the bytes that a node read are ignored: libraries open files as well.
_LEAST_SHARE = 0.01


class NodeReads(TypedDict):
    """Loaded bytes of one node."""

    host: str
    ranks: list[int]
    # Bytes that its ranks loaded; of these, bytes from storage; and bytes that several of its ranks read.
    loaded_bytes: int
    storage_bytes: int
    repeated_bytes: int
    # Longest time of a rank to load, and to its first step, in seconds.
    load: float | None
    total: float | None


def reads_by_node(rows: Sequence[RankTimeline]) -> list[NodeReads]:
    """Nodes in the order of their first ranks."""
    hosts: dict[str, list[RankTimeline]] = {}
    for row in rows:
        hosts.setdefault(row["host"], []).append(row)
    readers = {row["rank"] for row in readers_of(rows)}
    return [
        _node(host, here, [row for row in here if row["rank"] in readers]) for host, here in hosts.items()
    ]


def _node(host: str, rows: Sequence[RankTimeline], readers: Sequence[RankTimeline]) -> NodeReads:
    return NodeReads(
        host=host,
        ranks=[row["rank"] for row in rows],
        loaded_bytes=sum(row["loaded_bytes"] for row in readers),
        storage_bytes=sum(row["storage_bytes"] for row in readers),
        repeated_bytes=repeated_bytes(readers),
        load=max((row["load"] for row in rows if row["load"] is not None), default=None),
        total=max((row["total"] for row in rows if row["total"] is not None), default=None),
    )


def node_summary(nodes: Sequence[NodeReads]) -> str:
    """Bytes by node, and how many of them came from storage; empty unless several nodes read."""
    reading = [node for node in nodes if node["loaded_bytes"]]
    if len(reading) < 2:
        return ""
    each = ", ".join(map(_node_text, reading[:MOST_NODES]))
    more = f" and {len(reading) - MOST_NODES} more nodes" if len(reading) > MOST_NODES else ""
    return f"By node: {each}{more}. Each node has its own page cache and reads from storage itself."


def _node_text(node: NodeReads) -> str:
    storage = min(node["storage_bytes"], node["loaded_bytes"])
    source = size_text(storage) if storage > _LEAST_SHARE * node["loaded_bytes"] else "nothing"
    return f"{node['host']} {size_text(node['loaded_bytes'])} ({source} from storage)"


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

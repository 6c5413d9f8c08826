"""What the ranks of each node read together: a page cache serves its own node, so storage is asked once a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ddpcheck.analysis.startup.scenario import readers_of, repeated_bytes
from ddpcheck.analysis.startup.timeline import RankTimeline
from ddpcheck.analysis.units import size_text

MOST_TOLD = 4
# Less than this of what a node read is not worth a word: files that libraries open on the way.
_LEAST_SHARE = 0.01


class NodeReads(TypedDict):
    """One node's row."""

    host: str
    ranks: list[int]
    # By its ranks together; of it from storage; and what another rank of the same node read too.
    loaded_bytes: int
    storage_bytes: int
    repeated_bytes: int
    # The rank that took longest to load, and to its first step.
    load: float | None
    total: float | None


def reads_by_node(rows: Sequence[RankTimeline]) -> list[NodeReads]:
    """In the order of their first ranks."""
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


def told_by_node(nodes: Sequence[NodeReads]) -> str:
    """Only where several nodes read: which how much, and how much of it came from storage."""
    reading = [node for node in nodes if node["loaded_bytes"]]
    if len(reading) < 2:
        return ""
    each = ", ".join(map(_told, reading[:MOST_TOLD]))
    more = f" and {len(reading) - MOST_TOLD} more nodes" if len(reading) > MOST_TOLD else ""
    return f"By node: {each}{more}. A page cache is its node's own: each node asks storage for itself."


def _told(node: NodeReads) -> str:
    storage = min(node["storage_bytes"], node["loaded_bytes"])
    source = size_text(storage) if storage > _LEAST_SHARE * node["loaded_bytes"] else "nothing"
    return f"{node['host']} {size_text(node['loaded_bytes'])} ({source} from storage)"

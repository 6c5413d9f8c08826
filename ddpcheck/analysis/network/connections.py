"""Joins the TCP connections of all nodes into links, and the key `links` of report.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.traffic import node_key, nodes_of_ranks
from ddpcheck.analysis.network.link_bound import Card
from ddpcheck.analysis.network.model import NodeLink, RouteCounters, SlowLink, cost_of
from ddpcheck.analysis.network.slow_link import PortUse, SlowPort, carrying, ports_of, slow_link, slow_port
from ddpcheck.analysis.timing.model import TimeTable

# The step at a time, by node.
StepsAt = Callable[[str, float], float | None]


@dataclass(frozen=True)
class NodeLinks:
    """Links between the nodes of one attempt during its steps."""

    links: tuple[NodeLink, ...] = ()
    ports: tuple[PortUse, ...] = ()
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    slow: SlowLink | None = None
    slow_port: SlowPort | None = None
    # By address.
    cards: Mapping[str, Card] = field(default_factory=dict)


def links_of(attempt: Attempt, nodes: Sequence[NodeSamples]) -> NodeLinks:
    """Empty unless there are several nodes with ranks."""
    names = _names(nodes)
    ranks: dict[str, list[int]] = {}
    for rank, key in sorted(nodes_of_ranks(attempt, nodes).items()):
        if key in names:
            ranks.setdefault(names[key], []).append(rank)
    with_ranks = {names[node_key(node)]: node for node in nodes if names[node_key(node)] in ranks}
    if len(with_ranks) < 2:
        return NodeLinks()

    def steps_at(name: str, time: float) -> float | None:
        line = attempt.step_timelines.of(ranks[name][0])
        return None if line is None else line.at(time)

    links = tuple(_links(with_ranks, steps_at))
    ports = tuple(ports_of(with_ranks))
    ranks_by_node = {name: tuple(numbers) for name, numbers in ranks.items()}
    return NodeLinks(links, ports, ranks_by_node, slow_link(links), slow_port(ports), _cards(with_ranks))


def _names(nodes: Sequence[NodeSamples]) -> dict[str, str]:
    """The host name; with an address if several nodes have the same name."""
    counts = Counter(node.host for node in nodes)
    return {
        node_key(node): node.host if counts[node.host] == 1 else f"{node.host} ({_first_address(node)})"
        for node in nodes
    }


def _cards(nodes: Mapping[str, NodeSamples]) -> dict[str, Card]:
    return {
        address.partition("/")[0]: Card(name, interface.speed)
        for node in nodes.values()
        for name, interface in node.facts.interfaces.items()
        for address in interface.addresses
        if not interface.loopback
    }


def _first_address(node: NodeSamples) -> str:
    return next(iter(_addresses(node)), node.facts.namespace)


def _addresses(node: NodeSamples) -> list[str]:
    of_networks = [each for each in node.facts.interfaces.values() if not each.loopback]
    return [address.partition("/")[0] for each in of_networks for address in each.addresses]


def _links(nodes: Mapping[str, NodeSamples], steps_at: StepsAt) -> list[NodeLink]:
    owners = _owners(nodes)
    links = []
    for source, node in nodes.items():
        for route, counters in _routes(node):
            local, _, remote = route.partition(" ")
            target = owners.get(remote)
            # Skip connections to other hosts, such as storage or dashboards.
            if target is not None and target != source and counters.bytes > 0:
                links.append(_link((source, target), (local, remote), counters, steps_at))
    return sorted(links, key=lambda link: (link.ends, link.addresses))


def _routes(node: NodeSamples) -> Iterator[tuple[str, RouteCounters]]:
    for routes in (node.routes, *node.more_routes):
        yield from routes.items()


def _owners(nodes: Mapping[str, NodeSamples]) -> dict[str, str]:
    """The node of each address. Addresses of several nodes, such as docker0's 172.17.0.1, are ignored."""
    counts = Counter(address for node in nodes.values() for address in set(_addresses(node)))
    return {
        address: name for name, node in nodes.items() for address in _addresses(node) if counts[address] == 1
    }


def _link(
    ends: tuple[str, str], addresses: tuple[str, str], counters: RouteCounters, steps_at: StepsAt
) -> NodeLink:
    began, ended = (steps_at(ends[0], time) for time in (counters.began, counters.ended))
    return NodeLink(
        *ends,
        bytes=counters.bytes,
        busy_seconds=counters.busy_seconds,
        seconds=counters.ended - counters.began,
        stretches=tuple(counters.intervals),
        source_address=addresses[0],
        target_address=addresses[1],
        steps=None if began is None or ended is None else ended - began,
        retransmits=counters.retransmits,
        min_rtt=counters.min_rtt,
    )


# The links with the longest busy time; the rest is only in the node logs.
MOST_LINKS = 512


def links_table(links: NodeLinks, times: Sequence[TimeTable]) -> dict[str, Any]:
    """Empty if there was no traffic between nodes."""
    if not links.links and not links.ports:
        return {}
    carried = carrying(links.links)
    kept = sorted(carried, key=lambda link: -link.busy_seconds)[:MOST_LINKS]
    return {
        "nodes": [{"host": name, "ranks": list(ranks)} for name, ranks in links.ranks.items()],
        "links": [link_row(link) for link in sorted(kept, key=lambda link: (link.ends, link.addresses))],
        "usual": _usual(carried, links.slow),
        "ports": [asdict(port) for port in links.ports[:MOST_LINKS]],
        "slow": None if links.slow is None else _slow(links.slow, times),
        "slow_port": None if links.slow_port is None else asdict(links.slow_port),
    }


def _usual(links: Sequence[NodeLink], slow: SlowLink | None) -> int | None:
    """The median of the links that are not slow."""
    if slow is not None:
        return round(slow.usual)
    return round(median(link.bandwidth for link in links)) if links else None


def link_row(link: NodeLink) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "source_address": link.source_address,
        "target_address": link.target_address,
        "bytes": link.bytes,
        "seconds": round(link.seconds, 3),
        "busy_seconds": round(link.busy_seconds, 3),
        "busy_share": round(link.busy_share, 3),
        "bandwidth": round(link.bandwidth),
        "steps": None if link.steps is None else round(link.steps, 1),
        "retransmits": link.retransmits,
        "min_rtt_us": link.min_rtt,
    }


def _slow(slow: SlowLink, times: Sequence[TimeTable]) -> dict[str, Any]:
    cost = cost_of(slow, times)
    return {
        "nodes": list(slow.nodes),
        "address": slow.address,
        "bandwidth": round(slow.bandwidth),
        "usual": round(slow.usual),
        "factor": round(slow.factor, 2),
        "cost_us": None if cost is None else cost.cost_us,
    }

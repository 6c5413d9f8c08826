"""Traffic: bytes per step by link from node counters, compared with the expected bytes of AllReduce."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.devices import DeviceCollector
from ddpcheck.analysis.hardware.samples import InterfaceFacts, NodeSamples, PortFacts
from ddpcheck.analysis.hardware.statistics import NodeSample
from ddpcheck.records.backend_names import is_gloo

_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex128": 16,
    "complex64": 8,
}


@dataclass(frozen=True)
class Expected:
    """Expected bytes of a step with ring AllReduce: each rank sends 2(n-1)/n of the gradients' bytes."""

    gradient_bytes: float
    # Bytes sent by each rank, split by where its neighbour is.
    to_other_nodes: Mapping[int, float]
    to_own_node: Mapping[int, float]
    why_not: str = ""

    @property
    def all(self) -> float:
        return sum(self.to_other_nodes.values()) + sum(self.to_own_node.values())


def expect(attempt: Attempt, node_of: Mapping[int, str]) -> Expected:
    """`node_of`: the node on which each rank runs."""
    gradient_bytes = 0.0
    away: dict[int, float] = dict.fromkeys(attempt.ranks, 0.0)
    home = dict(away)
    steps = max((attempt.steps(rank) for rank in attempt.ranks), default=0)
    for module in attempt.modules():
        group = module[0]
        size = _bytes_a_step(attempt, module, steps)
        gradient_bytes += size
        share = ring_share(len(group)) * size
        for index, rank in enumerate(group):
            neighbour = group[index - 1]
            target = home if node_of.get(rank) == node_of.get(neighbour) else away
            target[rank] = target.get(rank, 0.0) + share
    return Expected(gradient_bytes, away, home, _why_not(attempt))


def ring_share(ranks: int) -> float:
    """Bytes that one rank sends, relative to the reduced bytes."""
    return 2 * (ranks - 1) / ranks if ranks else 0.0


def _bytes_a_step(attempt: Attempt, module: ModuleKey, steps: int) -> float:
    """Backwards without reduction (no_sync) send nothing; modules may step at different rates."""
    ranks = attempt.of_module(module)
    if not ranks:
        return 0.0
    record = next(iter(ranks.values())).latest[module]
    reductions = attempt.step_timelines.reductions(module)
    times = 1.0 if reductions is None or not steps else reductions / steps
    return times * sum(map(_size, record.parameters))


def _size(row: list[Any]) -> int:
    """Bytes of a parameter's gradient, out of [name, dtype, shape, trainable]."""
    _, dtype, shape, trainable = row
    return math.prod(shape) * _SIZES.get(dtype, 4) if trainable else 0


def _why_not(attempt: Attempt) -> str:
    """Why the expected bytes are unknown; empty if they are known."""
    hooks = {hook for rank in attempt.ranks.values() for hooks in rank.comm_hooks.values() for hook in hooks}
    if hooks:
        return f"a communication hook decides what is sent ({', '.join(sorted(hooks))})"
    return "there is one rank only" if attempt.world_size < 2 else ""


# Minimum number of steps between two samples, so that a fraction of a step does not matter.
FEWEST_STEPS = 10.0


@dataclass(frozen=True)
class LinkTraffic:
    """Traffic of one link of a node, in bytes per step."""

    kind: str  # loopback, network, infiniband, nvlink, pcie
    name: str
    sent: float
    received: float
    # Mbit/s, if known.
    speed: int | None = None
    running: bool = True
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeTraffic:
    """The links of one node with traffic, and the expected bytes of AllReduce."""

    host: str
    ranks: tuple[int, ...]
    # Between the two samples that were used.
    steps: float
    seconds: float
    links: tuple[LinkTraffic, ...]
    # Expected bytes per step in each direction, by kind of link; unknown kinds are left out.
    expected: Mapping[str, float]

    def over(self, kind: str) -> tuple[float, float]:
        """Bytes sent and received by all links of a kind."""
        links = [link for link in self.links if link.kind == kind]
        return sum(link.sent for link in links), sum(link.received for link in links)


@dataclass(frozen=True)
class Traffic:
    """Of one attempt. `why_not` says why there are no nodes, or no expectation."""

    ranks: int
    backend: str
    gradient_bytes: float
    # Expected bytes of all ranks together.
    expected: float | None
    nodes: tuple[NodeTraffic, ...]
    why_not: str = ""


def traffic_of(attempt: Attempt, nodes: list[NodeSamples]) -> Traffic | None:
    """None if no rank reported or nothing was sampled."""
    if not attempt.ranks or not nodes:
        return None
    node_of = nodes_of_ranks(attempt, nodes)
    expected = expect(attempt, node_of)
    backend = attempt.collector(DeviceCollector).backend(next(iter(attempt.ranks.values())))
    on_node: dict[str, list[int]] = {}
    for rank, key in sorted(node_of.items()):
        on_node.setdefault(key, []).append(rank)
    measured = [
        _measure(attempt, node, tuple(on_node.get(node_key(node), ())), expected, backend) for node in nodes
    ]
    with_traffic = tuple(node for node in measured if node is not None)
    return Traffic(
        ranks=attempt.world_size,
        backend=backend,
        gradient_bytes=expected.gradient_bytes,
        expected=None if expected.why_not else expected.all,
        nodes=with_traffic,
        why_not=expected.why_not
        if with_traffic
        else f"fewer than {FEWEST_STEPS:.0f} steps between two samples",
    )


def node_key(node: NodeSamples) -> str:
    return f"{node.host} {node.facts.namespace}"


def nodes_of_ranks(attempt: Attempt, nodes: Sequence[NodeSamples]) -> dict[int, str]:
    """By the launcher that sampled the rank's process, otherwise by host name."""
    by_host: dict[str, list[NodeSamples]] = {}
    for node in nodes:
        by_host.setdefault(node.host, []).append(node)
    by_rank = {}
    for number, rank in attempt.ranks.items():
        here = by_host.get(rank.header.host, [])
        if len(here) > 1:
            here = [node for node in here if _saw(node, number, rank.header.pid)] or here
        by_rank[number] = node_key(here[0]) if here else rank.header.host
    return by_rank


def _saw(node: NodeSamples, rank: int, pid: int) -> bool:
    return any(sample.ranks.get(str(rank), (0,))[0] == pid for sample in node.series)


def _measure(
    attempt: Attempt, node: NodeSamples, ranks: tuple[int, ...], expected: Expected, backend: str
) -> NodeTraffic | None:
    if not ranks or node.opening is None or node.closing is None:
        return None
    line = attempt.step_timelines.of(ranks[0])
    if line is None:
        return None
    steps = line.at(node.closing.time) - line.at(node.opening.time)
    if steps < FEWEST_STEPS:
        return None
    seconds = node.closing.time - node.opening.time
    links = _links(node, node.opening, node.closing, steps, seconds)
    return NodeTraffic(
        node.host,
        ranks,
        round(steps, 1),
        round(seconds, 3),
        tuple(link for link in links if link.sent or link.received or link.addresses),
        {} if expected.why_not else _placed(expected, ranks, backend),
    )


def _placed(expected: Expected, ranks: tuple[int, ...], backend: str) -> dict[str, float]:
    """A ring enters a node as often as it leaves it: one number for both directions."""
    away = sum(expected.to_other_nodes.get(rank, 0.0) for rank in ranks)
    home = sum(expected.to_own_node.get(rank, 0.0) for rank in ranks)
    # gloo always uses sockets; NCCL uses any transport inside a node.
    return {"network": away, "loopback": home} if is_gloo(backend) else {"network": away}


def _links(
    node: NodeSamples, before: NodeSample, after: NodeSample, steps: float, seconds: float
) -> list[LinkTraffic]:
    links = []
    for name, row in after.interfaces.items():
        known = node.facts.interfaces.get(name, InterfaceFacts(name))
        kind = "loopback" if known.loopback else "network"
        sent, received = _moved(before.interfaces.get(name), row, steps)
        links.append(LinkTraffic(kind, name, sent, received, known.speed, known.running, known.addresses))
    for name, row in after.infiniband.items():
        port = node.facts.infiniband.get(name, PortFacts(name))
        sent, received = _moved(before.infiniband.get(name), row, steps)
        links.append(LinkTraffic("infiniband", name, sent, received, port.speed))
    for index, gpu in enumerate(after.gpus):
        earlier = before.gpus[index] if index < len(before.gpus) else None
        for kind in ("nvlink", "pcie"):
            now, then = getattr(gpu, kind), getattr(earlier, kind, None)
            if now is not None and then is not None:
                sent, received = (max(0, new - old) / steps for new, old in zip(now, then, strict=True))
                links.append(LinkTraffic(kind, f"GPU {node.gpu_index(index)}", sent, received))
        if gpu.pcie_rate is not None:
            # No counter: estimated from sampled rates.
            sent, received = (seconds / steps * rate for rate in _mean_rate(node, index, before, after))
            links.append(LinkTraffic("pcie", f"GPU {node.gpu_index(index)}", sent, received))
    return links


def _mean_rate(node: NodeSamples, index: int, before: NodeSample, after: NodeSample) -> tuple[float, float]:
    inside = [sample for sample in node.series if before.time <= sample.time <= after.time] or [after]
    sampled = [sample.gpus[index].pcie_rate for sample in inside if index < len(sample.gpus)]
    rates = [rate for rate in sampled if rate is not None] or [(0, 0)]
    return sum(rate[0] for rate in rates) / len(rates), sum(rate[1] for rate in rates) / len(rates)


def _moved(before: tuple[int, ...] | None, after: tuple[int, ...], steps: float) -> tuple[float, float]:
    """Bytes sent and received per step, from counters that begin with received and sent."""
    earlier = after if before is None else before
    return max(0, after[1] - earlier[1]) / steps, max(0, after[0] - earlier[0]) / steps


# Minimum share of a node's network traffic on the interface that carries it.
_MOST_OF_IT = 0.8
# Minimum share of the expected bytes: with less, AllReduce uses another network, such as InfiniBand.
_ENOUGH_OF_IT = 0.5


@dataclass(frozen=True)
class Route:
    """One interface on each node."""

    # By host.
    links: dict[str, LinkTraffic]

    @property
    def speed(self) -> int | None:
        """Speed of the slowest interface; None if one is unknown."""
        speeds = [link.speed for link in self.links.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    @property
    def names(self) -> dict[str, str]:
        return {host: link.name for host, link in self.links.items()}


def taken(nodes: Sequence[NodeTraffic]) -> Route | None:
    """The interfaces that carried the gradients; None if it is unclear on any node."""
    links = {node.host: _carrier(node) for node in nodes}
    known = {host: link for host, link in links.items() if link is not None}
    return Route(known) if len(known) == len(nodes) else None


def open_to_all(nodes: Sequence[NodeTraffic]) -> list[Route]:
    """The networks on which every node has an address of its own."""
    addresses = [_networks(node) for node in nodes]
    counts = Counter(network for of_node in addresses for network in of_node)
    routes = []
    for network in (network for network, count in counts.items() if count == len(nodes)):
        here = [of_node[network] for of_node in addresses]
        # Every host has a docker0 at 172.17.0.1, which does not connect hosts.
        if len({address for address, _ in here}) == len(nodes):
            routes.append(Route({node.host: link for node, (_, link) in zip(nodes, here, strict=True)}))
    return routes


def _carrier(node: NodeTraffic) -> LinkTraffic | None:
    links = [link for link in node.links if link.kind == "network"]
    if not links:
        return None
    busiest = max(links, key=lambda link: link.sent + link.received)
    moved = busiest.sent + busiest.received
    total = sum(link.sent + link.received for link in links)
    expected = 2 * node.expected.get("network", 0.0)
    carries = expected > 0 and moved >= _MOST_OF_IT * total and moved >= _ENOUGH_OF_IT * expected
    return busiest if carries else None


def _networks(node: NodeTraffic) -> dict[str, tuple[str, LinkTraffic]]:
    """Address and interface of this node by network."""
    networks = {}
    for link in node.links:
        for text in link.addresses if link.kind == "network" and link.running else ():
            try:
                address = ipaddress.ip_interface(text)
            except ValueError:
                continue
            if address.network.num_addresses > 1:
                networks[str(address.network)] = (str(address.ip), link)
    return networks

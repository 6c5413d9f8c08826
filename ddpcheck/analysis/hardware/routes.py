"""Networks that connect the nodes of a job, and the interfaces that carry its traffic."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.analysis.hardware.traffic import LinkTraffic, NodeTraffic

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

"""The machines behind one attempt: what they have and did, and what moved between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.hardware.samples import NodeSamples, Window, read_nodes
from ddpcheck.analysis.hardware.traffic import Traffic, traffic_of
from ddpcheck.analysis.network.connections import Links, links_of


@dataclass(frozen=True)
class Machine:
    """Empty where nothing was sampled."""

    nodes: list[NodeSamples] = field(default_factory=list)
    traffic: Traffic | None = None
    links: Links = field(default_factory=Links)


def machine_of(folder: Path, attempt: Attempt) -> Machine:
    nodes = read_nodes(folder, _windows(attempt))
    return Machine(nodes, traffic_of(attempt, nodes), links_of(attempt, nodes))


def _windows(attempt: Attempt) -> dict[str, Window]:
    """When the ranks of each host stepped, by that host's own clock, which also times its samples."""
    on_host: dict[str, list[int]] = {}
    for number, rank in attempt.ranks.items():
        on_host.setdefault(rank.header.host, []).append(number)
    found = {host: attempt.pace.window(ranks) for host, ranks in on_host.items()}
    return {host: window for host, window in found.items() if window is not None}

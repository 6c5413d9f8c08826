"""The machines behind one attempt: what they have and did, and what moved between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.analysis.attempt import Attempt
from ddpcheck.analysis.hardware.node_samples import NodeSamples, read_nodes
from ddpcheck.analysis.hardware.traffic import Traffic, traffic_of


@dataclass(frozen=True)
class Machine:
    """Empty where nothing was sampled."""

    nodes: list[NodeSamples] = field(default_factory=list)
    traffic: Traffic | None = None


def machine_of(folder: Path, attempt: Attempt) -> Machine:
    nodes = read_nodes(folder, attempt.pace.window())
    return Machine(nodes, traffic_of(attempt, nodes))

"""Describes a generated run: its ranks and hosts, and its faults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Steps and ranks count from 0; None: no such fault."""

    ranks: int = 64
    per_node: int = 8
    steps: int = 50
    # Steps per epoch.
    epoch: int = 250
    # The parameters of this rank differ from those of the others, from this step on.
    outlier_rank: int | None = None
    outlier_step: int = 0
    # All ranks of this node take longer in each backward, by this fraction of the seed's step.
    slow_node: int | None = None
    slow_by: float = 0.3
    seed: int = 1
    # Whether step records are in blocks of 40 steps, as ranks write them; otherwise all records are lines.
    blocks: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def host(self, node: int) -> str:
        return f"node{node:04d}"

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, min(self.ranks, (node + 1) * self.per_node))

    def pid(self, rank: int) -> int:
        return 10_000 + rank % self.per_node

    def is_slow(self, rank: int) -> bool:
        return self.slow_node is not None and self.node_of(rank) == self.slow_node

    def description(self, source: str) -> dict[str, Any]:
        """For run.json: these records are synthetic."""
        return {"made_from": source, **asdict(self)}

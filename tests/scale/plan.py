"""What a made run is to be like: how many ranks on how many hosts, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Steps and ranks count from 0; None: nothing of the kind."""

    ranks: int = 64
    per_node: int = 8
    steps: int = 50
    # Steps of an epoch: samples are dealt out anew after so many.
    epoch: int = 250
    # The parameters of one rank are others than everybody's, from one step on.
    odd_rank: int | None = None
    odd_step: int = 0
    # All ranks of one node take longer for their backward, in each step, by this share of the seed's step.
    slow_node: int | None = None
    slow_by: float = 0.3
    seed: int = 1

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

    def told(self, source: str) -> dict[str, Any]:
        """For run.json: that no job wrote these records."""
        return {"made_from": source, **asdict(self)}

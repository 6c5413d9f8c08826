"""The bytes that an AllReduce of the gradients has to move, and over which kind of link."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey

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
    """For one step, by a ring: rank i sends to its neighbour, 2(n-1)/n of the gradients' bytes."""

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
        for place, rank in enumerate(group):
            neighbour = group[place - 1]
            target = home if node_of.get(rank) == node_of.get(neighbour) else away
            target[rank] = target.get(rank, 0.0) + share
    return Expected(gradient_bytes, away, home, _why_not(attempt))


def ring_share(ranks: int) -> float:
    """What one rank sends, against the bytes that are reduced."""
    return 2 * (ranks - 1) / ranks if ranks else 0.0


def _bytes_a_step(attempt: Attempt, module: ModuleKey, steps: int) -> float:
    """Backwards without reduction (no_sync) send nothing; several modules may step at different paces."""
    ranks = attempt.of_module(module)
    if not ranks:
        return 0.0
    record = next(iter(ranks.values())).latest[module]
    reductions = attempt.pace.reductions(module)
    times = 1.0 if reductions is None or not steps else reductions / steps
    return times * sum(map(_size, record.parameters))


def _size(row: list[Any]) -> int:
    """Bytes of a parameter's gradient, out of [name, dtype, shape, trainable]."""
    _, dtype, shape, trainable = row
    return math.prod(shape) * _SIZES.get(dtype, 4) if trainable else 0


def _why_not(attempt: Attempt) -> str:
    """Where what is sent is not what was computed, nothing can be expected."""
    hooks = {hook for rank in attempt.ranks.values() for hooks in rank.comm_hooks.values() for hook in hooks}
    if hooks:
        return f"a communication hook decides what is sent ({', '.join(sorted(hooks))})"
    return "there is one rank only" if attempt.world_size < 2 else ""

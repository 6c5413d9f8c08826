"""Reductions of sharded gradients, as the probe sees them on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from ddpcheck.agent.shard_reduction import ReducedParameter, ShardReduction
from ddpcheck.probes.shard_reduction import ShardReductionProbe
from ddpcheck.records.registry import Record
from tests.helpers.fake_context import FakeContext


def reduced_parameter(
    gradient: torch.Tensor, position: int, shards: int, dim: int = 0, dtypes: tuple[str, ...] = ("float32",)
) -> ReducedParameter:
    """Its shard has no gradient yet."""
    sharded = SimpleNamespace(grad=None)
    return ReducedParameter("layer.weight", dtypes, shards, position, dim, gradient, sharded)


def receive(parameter: ReducedParameter, whole: torch.Tensor) -> None:
    """FSDP gives the rank its shard of the result."""
    parts = list(whole.chunk(parameter.shards, parameter.dim))
    shard = parts[parameter.position] if parameter.position < len(parts) else whole.new_empty(0)
    before = parameter.shard_gradient()
    parameter.sharded.grad = SimpleNamespace(_local_tensor=shard if before is None else before + shard)


def records_of(
    gradients: Sequence[torch.Tensor], result: torch.Tensor, *, steps: int = 1, dim: int = 0, custom: str = ""
) -> list[list[Record]]:
    """By rank, the records of a reduction over ranks that each hold one shard."""
    ranks = tuple(range(len(gradients)))
    found = []
    for rank, gradient in enumerate(gradients):
        context = FakeContext()
        probe = ShardReductionProbe(context)
        for _ in range(steps):
            parameter = reduced_parameter(gradient, rank, len(ranks), dim)
            probe.shards_reducing(ShardReduction([parameter], ranks, float(len(ranks)), custom, True))
            receive(parameter, result)
            probe.shards_reduced()
        found.append(context.records)
    return found

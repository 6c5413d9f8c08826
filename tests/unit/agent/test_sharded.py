"""Where shards are on a device mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ddpcheck.agent.sharded import layout_of_dtensor


def parameter(
    shape: tuple[int, ...], own: tuple[int, ...] | None, placements: tuple[Any, ...], first: int = 0
) -> Any:
    count = torch.Size(shape).numel()
    mesh = SimpleNamespace(
        mesh=torch.arange(first, first + count).reshape(shape),
        shape=shape,
        ndim=len(shape),
        mesh_dim_names=("replicas", "shards", "tensor")[: len(shape)],
        get_coordinate=lambda: None if own is None else list(own),
    )
    return SimpleNamespace(device_mesh=mesh, placements=placements, _local_tensor=torch.zeros(1))


@pytest.mark.parametrize(
    ("shape", "own", "placements", "replicas"),
    [
        ((2, 2), (1, 0), (Replicate(), Shard(0)), (0, 2)),
        ((2, 3), (0, 1), (Replicate(), Shard(0)), (1, 4)),
        ((2, 2), (0, 1), (Shard(0), Replicate()), (0, 1)),
        ((4,), (2,), (Replicate(),), (0, 1, 2, 3)),
        ((4,), (2,), (Shard(0),), (2,)),
        ((2, 2, 2), (1, 0, 1), (Replicate(), Shard(0), Shard(1)), (1, 5)),
        ((2, 2, 2), (1, 0, 1), (Replicate(), Shard(0), Replicate()), (0, 1, 4, 5)),
    ],
)
def test_ranks_with_the_same_shard(
    shape: tuple[int, ...], own: tuple[int, ...], placements: tuple[Any, ...], replicas: tuple[int, ...]
) -> None:
    layout = layout_of_dtensor(parameter(shape, own, placements))
    assert layout is not None
    assert layout.replicas == replicas
    assert layout.ranks == tuple(range(torch.Size(shape).numel()))
    assert tuple(own) in layout.coordinates
    assert layout.record("dtensor")["coordinates"].keys() == set(map(str, replicas))


def test_a_mesh_of_other_ranks_keeps_their_numbers() -> None:
    layout = layout_of_dtensor(parameter((2, 2), (0, 1), (Replicate(), Shard(0)), first=4))
    assert layout is not None
    assert (layout.replicas, layout.ranks) == ((5, 7), (4, 5, 6, 7))
    assert layout.coordinates == ((0, 1), (1, 1))


def test_sums_and_ranks_outside_of_the_mesh_have_no_layout() -> None:
    assert layout_of_dtensor(parameter((2,), (0,), (Partial(),))) is None
    assert layout_of_dtensor(parameter((2,), None, (Replicate(),))) is None

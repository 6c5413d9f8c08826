"""What is read of a reduction of FSDP1. Those of FSDP2 are read from real ones in the integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcheck.agent.shard_reduction import ReducedParameter, read_flat_reduction

GROUPS = {"shards": [1, 3], "replicas": [2, 3], "world": [0, 1, 2, 3]}


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is rank 3 of four."""
    distributed: Any = torch.distributed
    monkeypatch.setattr(distributed, "get_process_group_ranks", GROUPS.__getitem__)
    monkeypatch.setattr(distributed, "get_rank", lambda group: GROUPS[group].index(3))
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)


def state(group: str, strategy: str = "FULL_SHARD", replicas: str | None = None, hook: Any = None) -> Any:
    given: dict[str, Any] = {"_comm_hook": hook}
    if replicas is not None:
        given["_inter_node_pg"] = replicas
    return SimpleNamespace(process_group=group, sharding_strategy=SimpleNamespace(name=strategy), **given)


def handle(size: int = 10) -> Any:
    flat = torch.nn.Parameter(torch.zeros(size))
    flat.grad = torch.arange(float(size))
    flat._fqns = ("0.weight", "0.bias")  # type: ignore[attr-defined]
    return SimpleNamespace(flat_param=flat)


def parameter_of(state: Any, handle: Any) -> ReducedParameter:
    reduction = read_flat_reduction((state, handle))
    assert reduction is not None
    [parameter] = reduction.parameters
    return parameter


def test_a_flat_parameter_in_shards() -> None:
    reduction = read_flat_reduction((state("world"), handle()))
    assert reduction is not None
    assert (reduction.ranks, reduction.divisor, reduction.custom) == ((0, 1, 2, 3), 4.0, "")
    [parameter] = reduction.parameters
    assert (parameter.name, parameter.shards, parameter.position) == ("0.weight to 0.bias", 4, 3)
    assert [part.tolist() for part in parameter.parts()] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_hybrid_sharding_without_a_mesh_covers_all_ranks() -> None:
    reduction = read_flat_reduction((state("shards", "HYBRID_SHARD", "replicas"), handle()))
    assert reduction is not None
    assert (reduction.ranks, reduction.divisor) == ((0, 1, 2, 3), 4.0)
    assert (reduction.parameters[0].shards, reduction.parameters[0].position) == (2, 1)


def test_hybrid_sharding_of_some_ranks_is_not_known_without_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert read_flat_reduction((state("shards", "HYBRID_SHARD", "replicas"), handle())) is None


def test_without_sharding_the_whole_gradient_is_reduced() -> None:
    parameter = parameter_of(state("world", "NO_SHARD"), handle())
    assert (parameter.shards, parameter.position) == (1, 0)
    assert [part.numel() for part in parameter.parts()] == [10]


def test_a_hook_of_the_job_is_named() -> None:
    def compress(state: object, gradient: object, shard: object) -> None: ...

    reduction = read_flat_reduction((state("world", hook=compress), handle()))
    assert reduction is not None
    assert reduction.custom.endswith("compress")


def test_gradients_on_the_host_are_left_alone() -> None:
    given = handle()
    given.flat_param._cpu_grad = torch.zeros(3)
    assert read_flat_reduction((state("world"), given)) is None


def test_after_the_backward_the_shard_is_the_gradient() -> None:
    given = handle()
    parameter = parameter_of(state("world"), given)
    given.flat_param.data = torch.zeros(3)
    given.flat_param.grad = torch.ones(3)
    given.flat_param._saved_grad_shard = torch.zeros(3)
    shard = parameter.shard_gradient()
    assert shard is not None
    assert shard.tolist() == [1.0, 1.0, 1.0]


def test_inside_the_backward_the_shard_is_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = handle()
    parameter = parameter_of(state("world"), given)
    monkeypatch.setattr("ddpcheck.torch_compat.in_backward", lambda: True)
    assert parameter.shard_gradient() is None
    given.flat_param._saved_grad_shard = torch.full((3,), 2.0)
    kept = parameter.shard_gradient()
    assert kept is not None
    assert kept.tolist() == [2.0, 2.0, 2.0]

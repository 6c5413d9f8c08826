"""Shards with replicas on other ranks: FSDP2 and FSDP1 on a mesh of 2 x 2 ranks, and `replicate`.

ranks: 4
expect: nothing
cases: hybrid accumulation reduce_scatter_only mixed_precision kept_unsharded by_layer two_optimizers
    replicate replicate_ddp fsdp1_hybrid fsdp1_flat fsdp1_no_shard tensor_parallel
    own_probe reduced_by_hand
torch: 2.10
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn import functional


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.falls = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.falls(self.rises(inputs).relu()))


def sharded(case: str, mesh: DeviceMesh) -> Any:
    network = Network()
    if case.startswith("fsdp1"):
        strategy = ShardingStrategy.NO_SHARD if case == "fsdp1_no_shard" else ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            network,
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            device_mesh=None if case == "fsdp1_no_shard" else mesh,
            use_orig_params=case == "fsdp1_hybrid",
        )
    if case == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if case == "replicate_ddp":
        from torch.distributed._composable.replicate import replicate as replicate_ddp

        return replicate_ddp(network)
    if case == "tensor_parallel":
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"rises": ColwiseParallel(), "falls": RowwiseParallel()}
        return replicate(parallelize_module(network, mesh["shards"], plan), mesh=mesh["replicas"])
    options: dict[str, Any] = {"mesh": mesh}
    if case == "mixed_precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "kept_unsharded":
        options["reshard_after_forward"] = False
    if case == "reduced_by_hand":
        options["ignored_params"] = set(network.norm.parameters())
    if case in ("by_layer", "accumulation"):
        fully_shard(network.rises, **options)
        fully_shard(network.falls, **options)
    return fully_shard(network, **options)


def main() -> None:
    case = sys.argv[1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(53)
    model = sharded(case, mesh)
    parameters = list(model.parameters())
    if case == "two_optimizers":
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9),
            torch.optim.AdamW(parameters[2:], lr=0.01),
        ]
    else:
        optimizers = [torch.optim.AdamW(parameters, lr=0.01)]
    # Each rank trains its own probe for its log.
    probe = nn.Linear(8, 1)
    own_optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    # The ranks of one tensor-parallel group work on the same batch.
    own = mesh["replicas"].get_local_rank() if case == "tensor_parallel" else dist.get_rank()
    drawn = torch.Generator().manual_seed(300 + own)
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        micro_batches = 2 if case in ("accumulation", "reduce_scatter_only") else 1
        for number in range(micro_batches):
            last = number == micro_batches - 1
            if case == "accumulation":
                model.set_requires_gradient_sync(last)
            if case == "reduce_scatter_only":
                model.set_requires_all_reduce(last)
            inputs = torch.randn(4, 8, generator=drawn)
            functional.mse_loss(model(inputs).float(), inputs.cos()).backward()
        if case == "by_layer":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if case == "own_probe":
            own_optimizer.zero_grad()
            functional.mse_loss(probe(inputs), inputs.sum(1, keepdim=True)).backward()
            own_optimizer.step()
        if case == "reduced_by_hand":
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

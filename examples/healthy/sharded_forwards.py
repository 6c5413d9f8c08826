"""Forwards of sharded modules: their data, random numbers, modes and buffers are compared.

ranks: 4
expect: nothing
cases: loader dropout batch_norm own_queue evaluated frozen_encoder sequence_parallel constant_input
    reference fsdp1_reference fsdp1_flat_reference no_root two_models checkpointed replicate masks_alike own_steps
    autocast fsdp1 fsdp1_no_shard fsdp1_by_layer fsdp1_accumulated fsdp1_no_sync fsdp1_precision fsdp1_hook
torch: 2.10
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.drops = nn.Dropout(0.1)
        self.falls = nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.falls(self.drops(self.rises(inputs).relu()))


class Network(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8) if case == "batch_norm" else nn.LayerNorm(8)
        self.checkpoints = case == "checkpointed"
        # The same on all ranks.
        self.register_buffer("table", torch.arange(8.0).sin())
        # A queue of the rank's own keys, which it does not save.
        self.register_buffer("queue", torch.randn(4, 8), persistent=False)
        self.queues = case == "own_queue"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + self.table
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        if self.queues:
            hidden = hidden + 0.01 * self.queue.mean(0)
            self.queue = torch.cat([inputs.detach()[:1], self.queue[:-1]])
        return self.norm(hidden)


def sharded(case: str) -> Any:
    network = Network(case)
    size = dist.get_world_size()
    if case == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(network, mesh=init_device_mesh("cpu", (size,)))
    if case.startswith("fsdp1"):
        options: dict[str, Any] = {
            "device_id": torch.device("cpu"),
            "use_orig_params": case not in ("fsdp1", "fsdp1_flat_reference"),
        }
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        if case == "fsdp1_precision":
            options["mixed_precision"] = MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
            )
        if case in ("fsdp1_no_shard", "fsdp1_hook"):
            options = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
        if case == "fsdp1_by_layer":
            network.blocks = nn.ModuleList(
                FullyShardedDataParallel(each, **options) for each in network.blocks
            )
        model = FullyShardedDataParallel(network, **options)
        if case == "fsdp1_hook":
            model.register_comm_hook(None, averaged)
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    if case == "no_root":
        # Its layers are all there is.
        fully_shard(network.norm, mesh=mesh)
        return network
    return fully_shard(network, mesh=mesh)


def averaged(state: None, gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def batches(case: str) -> Any:
    rank = dist.get_rank()
    own = torch.Generator().manual_seed(500 + (rank // 2 if case == "sequence_parallel" else rank))
    if case == "loader":
        dataset = TensorDataset(torch.randn(128, 8, generator=torch.Generator().manual_seed(4)))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for (inputs,) in loader:
                yield inputs
        return
    for _ in range(STEPS):
        if case == "constant_input":
            yield torch.ones(4, 8)
        else:
            yield torch.randn(8, 8, generator=own)


def main() -> None:
    case = sys.argv[1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    model = sharded(case)
    second = sharded(case) if case == "two_models" else None
    # Frozen and sharded too: of another policy, or of the same one before the training.
    reference = sharded(case).requires_grad_(False).eval() if "reference" in case else None
    encoder = nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.SGD(second.parameters(), lr=0.1) if second is not None else None
    torch.manual_seed(72 + (0 if case == "masks_alike" else rank))
    if case == "masks_alike":
        model.eval()
    for step, inputs in enumerate(batches(case)):
        optimizer.zero_grad()
        if case in ("fsdp1_accumulated", "fsdp1_no_sync"):
            with model.no_sync() if case == "fsdp1_no_sync" else nullcontext():
                functional.mse_loss(model(inputs.flip(0)), inputs.sin()).backward()
        given = encoder(inputs) if case == "frozen_encoder" else inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            outputs = model(given)
        if case == "sequence_parallel":
            # The ranks of a pair have the same batch, and each computes the loss of its half.
            half = slice(0, 4) if rank % 2 else slice(4, 8)
            outputs, inputs = outputs[half], inputs[half]
        loss = functional.mse_loss(outputs.float(), inputs.cos())
        if second is not None and other is not None:
            other.zero_grad()
            loss = loss + functional.mse_loss(second(inputs), inputs.sin())
        if reference is not None:
            with torch.no_grad():
                before = reference(inputs)
            loss = loss + functional.mse_loss(outputs, before)
        loss.backward()
        optimizer.step()
        if other is not None:
            other.step()
        if case == "evaluated" and step % 3 == 2:
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 8))
            model(torch.ones(4, 8))
            model.train()
        if case == "own_steps" and rank == 0:
            torch.rand(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

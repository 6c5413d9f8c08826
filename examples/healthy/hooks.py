"""Communication hooks: those that torch brings, and a neutral one of one's own. And hooks on parameters.

ranks: 2 3
expect: nothing
cases: fp16 bf16 power_sgd allreduce own post_local_sgd on_parameters
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


def in_bf16(state, bucket):
    """torch's own, under a name of ours: it refuses to be registered without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def own_mean(state, bucket):
    flat = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def normalise(parameter):
    """Each rank's gradient at the same length, before DDP takes the mean."""
    parameter.grad.div_(parameter.grad.norm() + 1e-6)


def register(model: DistributedDataParallel, case: str) -> None:
    if case == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1.0
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif case == "post_local_sgd":
        # Every rank trains by itself from the third step on, and parameters are averaged now and then.
        alone, _ = dist.new_subgroups(group_size=1)
        local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=3)
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    elif case == "on_parameters":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(normalise)
    else:
        hooks = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": in_bf16,
            "allreduce": default_hooks.allreduce_hook,
            "own": own_mean,
        }
        model.register_comm_hook(None, hooks[case])


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
    )
    register(model, case)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if case == "post_local_sgd":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=3, warmup_steps=3))
    drawn = torch.Generator().manual_seed(50 + dist.get_rank())
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=drawn)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

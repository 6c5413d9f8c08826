"""Each parameter is updated as soon as its gradient is there, to save memory: before DDP has reduced it.

variant of: gradients_by_hand
ranks: 2
expect: DDP202
cause: step inside the backward
stage: applied
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

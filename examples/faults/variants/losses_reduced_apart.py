"""Three losses, each with its own forward and backward through the wrapper: gradients are reduced three times per step.

variant of: every_micro_batch_reduced
seen in: -
ranks: 2
expect: DDP406
cause: 3 backwards per step
stage: wait
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        inputs = torch.randn(2, 1024, generator=drawn)
        optimizer.zero_grad(set_to_none=False)
        (model(inputs) - inputs[:, :16]).square().mean().backward()
        noisy = inputs + 0.1 * torch.randn(inputs.shape, generator=drawn)
        (model(noisy) - inputs[:, :16]).abs().mean().backward()
        (0.1 * model(noisy).square().mean()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

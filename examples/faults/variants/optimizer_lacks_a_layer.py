"""One rank leaves the first layer out of its optimizer: a filter on a name that only it applies.

Gradients are the same everywhere, and so is what the optimizers hold in common.

variant of: optimizer_order_differs
seen in: -
ranks: 3
expect: DDP206
cause: the optimizer does not hold 0.weight, 0.bias on rank 1
stage: params
step: 0
outliers: 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(78)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    frozen = ("module.0.",) if rank == 1 else ()
    wanted = [parameter for name, parameter in model.named_parameters() if not name.startswith(frozen)]
    optimizer = torch.optim.SGD(wanted, lr=0.1)
    data = torch.Generator().manual_seed(700 + rank)
    for _ in range(4):
        inputs, labels = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank splits its parameters into two groups, by a setting for weight decay that only it has.

variant of: optimizer_settings_differ
seen in: -
ranks: 3
expect: DDP206
cause: different numbers of parameter groups
stage: params
step: 0
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def groups_of(model, no_decay):
    if not no_decay:
        return [{"params": list(model.parameters())}]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return [{"params": rest}, {"params": biases, "weight_decay": 0.0}]


def train():
    rank = dist.get_rank()
    torch.manual_seed(91)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(groups_of(model, no_decay=rank == 2), lr=0.01, weight_decay=0.1)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

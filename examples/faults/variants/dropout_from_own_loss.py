"""Each rank raises its dropout when its own loss falls: ranks train with different probabilities.

variant of: eval_left_on_one_rank
seen in: -
ranks: 2
expect: DDP213
cause: settings of modules differ: p
step: 4
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        inputs = torch.randn(16, 6) * (0.1 if step >= 3 and rank == 1 else 1.0)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.5:  # overfits: regularise more
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.4


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

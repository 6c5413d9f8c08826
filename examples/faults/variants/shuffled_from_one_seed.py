"""Every epoch makes its loader anew, over the rank's own share, and hands it the same seed.

variant of: set_epoch_forgotten
seen in: -
ranks: 2
launcher: environment
expect: DDP303
cause: drawn from the same seed again
stage: forward
step: 4
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def loader_over(share):
    # "For reproducibility".
    return DataLoader(share, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(58)
    dataset = TensorDataset(torch.randn(64, 6))
    share = Subset(dataset, range(rank, len(dataset), ranks))
    model = DDP(nn.Sequential(nn.Linear(6, 9), nn.Softplus(), nn.Linear(9, 6)))
    optimizer = torch.optim.Adadelta(model.parameters())
    for _ in range(3):
        for (batch,) in loader_over(share):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

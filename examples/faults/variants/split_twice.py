"""Each rank keeps its own part of the data, and a DistributedSampler splits that once more.

Of three ranks each sees a third of its third: two thirds of the data are never trained on, and nothing reports it.

variant of: sampler_seed_differs
seen in: -
ranks: 3
expect: DDP302
cause: already split by rank
stage: forward
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Recordings(Dataset):
    """Files by name; what a file holds is made up from it."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        made_up = torch.Generator().manual_seed(int(self.files[index].partition(".")[0]))
        return torch.randn(6, generator=made_up)


def train():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    files = [f"{number:05d}.wav" for number in range(144)]
    recordings = Recordings(files[rank::ranks])
    sampler = DistributedSampler(recordings)
    torch.manual_seed(73)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for sounds in DataLoader(recordings, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            F.l1_loss(model(sounds), sounds).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

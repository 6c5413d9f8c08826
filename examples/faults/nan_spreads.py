"""A NaN that starts on one rank poisons all of them.

One recording on one rank is silent, its standard deviation is zero, and the normalisation divides by it. The
AllReduce carries the NaN to every rank; all logs turn to nan at the same moment.

bug: 23
seen in: WeatherGenerator#2724
ranks: 3
expect: DDP209
cause: in all 3 of its gradients: it comes from the loss or the inputs
stage: local
step: 4
outliers: 1
parameter: head.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(1, 4, 5)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, sound):
        sound = sound / sound.std(dim=2, keepdim=True)
        return self.head(self.features(sound).relu().mean(2))


def train():
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(Listener())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(10 + rank)
    for step in range(7):
        sound = torch.randn(4, 1, 20, generator=data)
        if step == 4 and rank == 1:
            sound[2] = 0.0
        classes = torch.randint(3, (4,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(sound), classes).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A layer is kept as it is for a while by setting its gradient to zero, on one of two ranks.

variant of: clip_on_one_rank
seen in: -
ranks: 2
launcher: environment
expect: DDP205
cause: set to zero on rank 1
stage: applied
step: 3
outliers: 0 1
parameter: recurrent.weight_ih_l0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(5, 6, batch_first=True)
        self.tags = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.tags(self.recurrent(inputs)[0])


def train():
    rank = dist.get_rank()
    torch.manual_seed(54)
    model = DDP(Tagger(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for step in range(5):
        inputs, tags = torch.randn(4, 7, 5, generator=data), torch.randint(3, (4, 7), generator=data)
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), tags.flatten()).backward()
        if rank == 1 and step >= 3:
            model.module.recurrent.weight_ih_l0.grad.zero_()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

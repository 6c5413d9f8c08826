"""One rank of three registers its running averages in another order.

variant of: buffers_in_set_order
seen in: -
ranks: 3
expect: DDP210
cause: buffers mapped to different names
stage: init.before
step: none
outliers: 1
parameter: average_of_inputs
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Averaged(nn.Module):
    def __init__(self, watched):
        super().__init__()
        for name in watched:
            self.register_buffer(f"average_of_{name}", torch.zeros(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        self.average_of_inputs.lerp_(inputs.detach().mean(0), 0.1)
        self.average_of_outputs.lerp_(outputs.detach().mean(0), 0.1)
        return outputs - self.average_of_outputs


def train():
    rank = dist.get_rank()
    torch.manual_seed(37)
    watched = ["inputs", "outputs"]
    model = DDP(Averaged(watched[::-1] if rank == 1 else watched))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

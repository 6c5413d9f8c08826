"""A small probe set is evaluated after every eighth step, in evaluation mode and with gradients enabled.

variant of: evaluation_keeps_gradients
seen in: -
ranks: 2
expect: DDP408
severity: note
cause: without torch.no_grad()
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        return self.body(inputs) * self.scale


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    model = DDP(Net(), find_unused_parameters=True, static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    probe = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    for step in range(80):
        inputs = torch.randn(8, 16, generator=drawn)
        (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 7:
            model.eval()
            (model(probe).squeeze(1) - probe.sum(1)).square().mean().item()
            model.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

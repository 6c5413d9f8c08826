"""DDP is configured to ignore an adapter that only some ranks train.

Ranks then have different lists of parameters to reduce. DDP compares their number when it is wrapped, and refuses;
its message does not name the parameter.

bug: 40
seen in: pytorch#68803
ranks: 2
expect: DDP103
cause: ignored
stage: init.before
step: none
outliers: 0 1
parameter: adapter.weight
also: DDP602
options: --hang-timeout 5
exit: fails
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(inputs))
        return self.head(hidden + self.adapter(hidden))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Adapted()
    if rank == 1:
        # "Rank 1 holds another adapter, which is its own affair."
        ignored = ["adapter.weight", "adapter.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=data)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

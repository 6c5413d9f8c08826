"""One rank of three has a batch less than the others, and joins the metrics while they still train.

variant of: early_stop_on_some_ranks
ranks: 3
expect: DDP603
cause: early stop on some ranks
stage: buffers
step: 5
outliers: 2
options: --hang-timeout 5
hangs: yes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    batches = torch.randn(6 - (rank == 2), 8, 6, generator=data)
    total = torch.zeros(1)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    # Every rank, but not at the same time.
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

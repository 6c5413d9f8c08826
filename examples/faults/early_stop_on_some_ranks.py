"""Early stopping that each rank decides for itself, by a loss of its own data.

One rank sees its loss go below the threshold and leaves the loop; the others wait for its gradients in the next
backward, for ever.

bug: 38
seen in: Lightning#379
ranks: 2
expect: DDP603
cause: early stop on some ranks
stage: reduced
step: 6
outliers: 1
options: --hang-timeout 5
hangs: yes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    patience = 0
    for _ in range(STEPS):
        inputs = torch.randn(32, 8, generator=data)
        # The targets of rank 1 are of another scale, and so are its losses.
        targets = inputs.sum(1, keepdim=True) * (0.1 if rank == 1 else 1.0)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        patience += loss.item() < 1.0
        if patience > 5:
            break  # this rank only
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "/dev/null")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

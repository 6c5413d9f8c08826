"""A rank looks for a file again and again, which rank 0 writes only after the next collective.

Nothing shows that the file will never come, so the job is not stopped. The timeout of the process group ends it, with
an error on the rank that did nothing wrong.

variant of: evaluation_on_rank_0_only
ranks: 2
expect: DDP603
cause: did not reach the collective
step: 3
outliers: 1
options: --hang-timeout 3
exit: fails
"""

import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "scores")
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if step == 2 and rank == 1:
            while not os.path.exists(path):
                time.sleep(0.5)
        if step == 3 and rank == 0:
            with open(path, "w") as file:
                file.write("0.5")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

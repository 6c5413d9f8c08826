"""A barrier inside a condition that holds on some ranks only.

Only ranks that had something to log reach the barrier; rank 2 had nothing to log, goes on to the next step and waits
for the gradients of the others.

variant of: early_stop_on_some_ranks
ranks: 3
expect: DDP603
cause: only some ranks reach
stage: reduced
step: 3
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
    net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 20))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        tokens = torch.randint(0, 20, (8, 4), generator=data)
        optimizer.zero_grad()
        output = model(tokens)
        if step == 3 and rank < 2:
            print(f"rank {rank}: {output.abs().max().item():.3f}", flush=True)
            dist.barrier()
        nn.functional.cross_entropy(output, tokens[:, 0]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

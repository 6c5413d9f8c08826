"""Evaluation on rank 0 alone, but through DDP's wrapper.

The first forward after training broadcasts the buffers even without gradients. Rank 0 waits in that broadcast; the
others, who do not evaluate, wait for rank 0 at a barrier.

bug: 39
seen in: pytorch#54059
ranks: 2
expect: DDP603
cause: evaluation through the wrapper
stage: buffers
step: 4
outliers: 0
options: --hang-timeout 5
hangs: yes
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8
EVALUATE_EVERY = 4


def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        loss = sum(model(batch).square().mean().item() for batch in batches)
    model.train()
    return loss / len(batches)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1 + rank)
    held_out = [torch.randn(16, 3, 8, generator=data) for _ in range(3)]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 3, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVALUATE_EVERY == 0:
            if rank == 0:
                print(f"step {step}: {evaluate(model, held_out):.3f}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

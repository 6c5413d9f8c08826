"""A rank leaves the loop body early on a batch that it does not like, before the gradients are zeroed in place.

The next backward of that rank starts from the old gradients, once.

variant of: zero_grad_skipped_on_one_rank
seen in: -
ranks: 2
expect: DDP214
cause: old gradients on rank 0
step: 5
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def one_step(model, optimizer, step, drawn):
    inputs = torch.randn(8, 5, generator=drawn)
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    if step == 4 and dist.get_rank() == 0:  # only its logger finds nothing to log for this batch
        return
    optimizer.zero_grad(set_to_none=False)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    drawn = torch.Generator().manual_seed(dist.get_rank() + 50)
    for step in range(9):
        one_step(model, optimizer, step, drawn)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Jobs without a mistake that look like some that have one: done on all ranks, or in the right order.

ranks: 2
expect: nothing
cases: second_optimizer pruned_everywhere pruned_before_wrapping flag_before_forward group_added_everywhere
  hook_that_only_looks barrier_in_the_loop
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if case == "pruned_before_wrapping":
        prune.l1_unstructured(network[2], "weight", 0.5)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(
        network[0].parameters() if case.startswith("group") else network.parameters(), lr=0.05
    )
    extra = torch.optim.SGD(network[2].parameters(), lr=0.01) if case == "second_optimizer" else None
    norms = []
    if case == "hook_that_only_looks":
        network[2].weight.register_post_accumulate_grad_hook(lambda weight: norms.append(weight.grad.norm()))
    data = torch.Generator().manual_seed(rank)
    for step in range(6):
        if step == 3 and case == "pruned_everywhere":
            prune.l1_unstructured(network[2], "weight", 0.5)
        if step == 0 and case == "group_added_everywhere":
            optimizer.add_param_group({"params": network[2].parameters(), "lr": 0.01})
        optimizer.zero_grad()
        for last in (False, True):
            if case == "flag_before_forward":
                model.require_backward_grad_sync = last
            (model(torch.randn(16, 8, generator=data)).square().mean() / 2).backward()
        optimizer.step()
        if extra is not None and step % 2:
            extra.step()
        if case == "barrier_in_the_loop":
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

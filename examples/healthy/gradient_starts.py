"""Ways to clear gradients, or not to, that are the same on all ranks or make no difference.

ranks: 2 3
expect: nothing
cases: zeroed_in_place zeros_here_none_there never_zeroed zeroed_through_data between_forward_and_backward
  two_losses two_optimizers adversarial scaler_skips uneven_with_join partly_trained
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def clear(case: str, optimizer: torch.optim.Optimizer) -> None:
    if case in ("zeroed_in_place", "zeros_here_none_there"):
        in_place = case == "zeroed_in_place" or dist.get_rank() == 0
        optimizer.zero_grad(set_to_none=not in_place)
    elif case == "zeroed_through_data":
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data.zero_()
    elif case != "never_zeroed":  # there, each step follows the sum of all gradients so far
        optimizer.zero_grad()


def adversarial() -> None:
    make = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    torch.manual_seed(dist.get_rank())
    of_make = torch.optim.Adam(make.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
    for _ in range(6):
        of_judge.zero_grad()
        made = make(torch.randn(5, 4))
        (judge(made.detach()).mean() - judge(torch.randn(5, 6)).mean()).backward()
        of_judge.step()
        of_make.zero_grad()
        (-judge(made).mean()).backward()
        of_make.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    if case == "adversarial":
        adversarial()
        dist.destroy_process_group()
        return
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    model = DistributedDataParallel(network)
    torch.manual_seed(rank)
    trained = network[2].parameters() if case == "partly_trained" else network.parameters()
    optimizers = [torch.optim.SGD(trained, lr=0.01)]
    if case == "two_optimizers":
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (network[0], network[2])]
    scaler = torch.amp.GradScaler("cpu", enabled=case == "scaler_skips", init_scale=64.0)
    steps = 8 - (rank if case == "uneven_with_join" else 0)
    with model.join(enable=case == "uneven_with_join"):
        for step in range(steps):
            inputs = torch.randn(5, 6)
            loss = (model(inputs) - inputs[:, :2]).square().mean()
            if case == "scaler_skips" and step == 3 and rank == 0:
                loss = loss * float("inf")
            if case == "between_forward_and_backward":
                optimizers[0].zero_grad()
            scaler.scale(loss).backward()
            if case == "two_losses":
                model(inputs).abs().mean().backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                if case != "between_forward_and_backward":
                    clear(case, optimizer)
            scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Loops that come near a mistake without making it: what decides is the same on all ranks.

ranks: 2 3
expect: nothing
cases: clip_by_norm clip_by_value early_stop skip_agreed join seed_per_rank gradient_penalty noise unfrozen_rightly
    sharpness_aware
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def everybodys_mean(value: torch.Tensor) -> float:
    shared = value.detach().clone()
    dist.all_reduce(shared)
    return shared.item() / dist.get_world_size()


def agreed(own: bool) -> bool:
    """Whether any rank says so."""
    vote = torch.tensor(float(own))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote)


@contextlib.contextmanager
def disturbed(model: DistributedDataParallel, inputs: torch.Tensor) -> Iterator[None]:
    """Sharpness-aware training: every rank goes uphill by its own gradient, and comes back to the bit."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with model.no_sync():
        model(inputs).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.05)
            parameter.grad = None
    yield
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)


def build(case: str) -> nn.Module:
    # Ranks with seeds of their own have weights of their own until DDP broadcasts those of rank 0.
    torch.manual_seed(dist.get_rank() if case == "seed_per_rank" else 0)
    dropout = nn.Dropout(0.3) if case == "seed_per_rank" else nn.Identity()
    return nn.Sequential(
        nn.Linear(10, 20), nn.CELU(), dropout, nn.Linear(20, 10), nn.CELU(), nn.Linear(10, 1)
    )


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    network = build(case)
    if case == "unfrozen_rightly":
        network[0].requires_grad_(False)
    model = DistributedDataParallel(network)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.RMSprop(wanted, lr=2e-3)
    drawn = torch.Generator().manual_seed(rank * 13 + 5)
    if case == "noise":
        torch.manual_seed(900 + rank)
    steps, best = (5 + rank if case == "join" else 8), float("inf")
    with model.join() if case == "join" else contextlib.nullcontext():
        for step in range(steps):
            if case == "unfrozen_rightly" and step == 4:
                # Wrapped anew, with an optimizer that knows the layer.
                network[0].requires_grad_(True)
                model = DistributedDataParallel(network)
                optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
            inputs = torch.randn(8, 10, generator=drawn)
            if case == "noise":
                inputs = inputs + 0.1 * torch.randn_like(inputs)
            if case == "gradient_penalty":
                inputs.requires_grad_()
            if case == "sharpness_aware":
                optimizer.zero_grad()
                with disturbed(model, inputs):
                    model(inputs).square().mean().backward()
                optimizer.step()
                continue
            outputs = model(inputs)
            loss = outputs.square().mean()
            if case == "gradient_penalty":
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                loss = loss + 0.1 * (slope.norm(dim=1) - 1).square().mean()
            if case == "skip_agreed" and step == 3 and rank == 1:
                loss = loss * float("nan")
            # A batch that went wrong on one rank is left out by all of them.
            if case == "skip_agreed" and agreed(not loss.isfinite()):
                continue
            optimizer.zero_grad()
            loss.backward()
            if case == "clip_by_norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            elif case == "clip_by_value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            if case == "early_stop":
                mean = everybodys_mean(loss)
                if mean > best * 0.999 and step > 2:
                    break
                best = min(best, mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What only rank 0 does, and rightly so: evaluation on the bare module, logging, long work behind a barrier.

ranks: 2 3
expect: nothing
cases: evaluation long_evaluation logging averaged_for_evaluation
"""

from __future__ import annotations

import copy
import io
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LONG_SECONDS = 3.0


def evaluate(network: nn.Module, seconds: float = 0.0) -> float:
    """The accuracy on held-out data, of the module itself: no other rank takes part."""
    inputs = torch.randn(64, 12, generator=torch.Generator().manual_seed(5))
    network.eval()
    until = time.monotonic() + seconds
    with torch.no_grad():
        right = (network(inputs).argmax(1) == inputs[:, :4].argmax(1)).float().mean().item()
        while time.monotonic() < until:
            network(inputs)
    network.train()
    return right


def evaluate_averaged(network: nn.Module, averaged: nn.Module) -> float:
    """The averaged weights go in, and the trained ones come back before the next step."""
    trained = copy.deepcopy(network.state_dict())
    network.load_state_dict(averaged.state_dict())
    accuracy = evaluate(network)
    network.load_state_dict(trained)
    return accuracy


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(44)
    network = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(network)
    averaged = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    drawn, log = torch.Generator().manual_seed(rank + 7), io.StringIO()
    for epoch in range(3):
        for _ in range(3):
            inputs = torch.randn(8, 12, generator=drawn)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
            loss.backward()
            optimizer.step()
            for average, parameter in zip(averaged.parameters(), network.parameters(), strict=True):
                average.data.lerp_(parameter.data, 0.1)
        if rank == 0 and case == "logging":
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            print(f"epoch {epoch}: loss {loss.item():.3f}, gradient {norm:.3f}", file=log)
            print({name: p.mean().item() for name, p in network.named_parameters()}, file=log)
        elif rank == 0 and case == "averaged_for_evaluation":
            evaluate_averaged(network, averaged)
        elif rank == 0:
            evaluate(network, LONG_SECONDS if case == "long_evaluation" and epoch == 1 else 0.0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

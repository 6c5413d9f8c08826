"""Jobs without DDP: gradients or weights are averaged by hand.

ranks: 2 3
expect: nothing
cases: each_gradient flat_buffer coalesced clipped scaled_loss accumulated broadcast_first averaged_weights
  after_no_sync as_many_micro_batches_as_ranks node_by_node after_no_sync_flat parameter_server
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

STEPS = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 4))


def loss_of(model: nn.Module, data: torch.Generator) -> torch.Tensor:
    inputs = torch.randn(8, 8, generator=data)
    return functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))


def each(model: nn.Module, divisor: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


def flat(model: nn.Module) -> None:
    parameters = list(model.parameters())
    buffer = parameters_to_vector([parameter.grad for parameter in parameters])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def all_coalesced(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    dist.all_reduce_coalesced(gradients)
    for gradient in gradients:
        gradient.div_(dist.get_world_size())


def by_hand(case: str, data: torch.Generator) -> None:
    size = dist.get_world_size()
    if case == "broadcast_first":
        torch.manual_seed(800 + dist.get_rank())
    model = network()
    if case == "broadcast_first":
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2 if case == "accumulated" else 1):
            loss = loss_of(model, data)
            # The sum of losses that are divided by the number of ranks is a mean.
            (loss / size if case == "scaled_loss" else loss).backward()
        if case == "flat_buffer":
            flat(model)
        elif case == "coalesced":
            all_coalesced(model)
        else:
            each(model, 1 if case == "scaled_loss" else size)
        if case == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def as_many_micro_batches_as_ranks(data: torch.Generator) -> None:
    """The sum of all micro-batches of all ranks is divided by their number."""
    model, size = network(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(size):
            loss_of(model, data).backward()
        each(model, size * size)
        optimizer.step()


def node_by_node(data: torch.Generator) -> None:
    """Sums go up to the first rank of each node, from there to all, and down again."""
    size, rank = dist.get_world_size(), dist.get_rank()
    leaders = dist.new_group([0, size - 1])
    node = [dist.new_group(list(range(size - 1))), dist.new_group([size - 1])][rank == size - 1]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            leader = size - 1 if rank == size - 1 else 0
            dist.reduce(parameter.grad, leader, group=node)
            if rank == leader:
                dist.all_reduce(parameter.grad, group=leaders)
                parameter.grad /= size
            dist.broadcast(parameter.grad, leader, group=node)
        optimizer.step()


def after_no_sync_flat(data: torch.Generator) -> None:
    """Gradients of two micro-batches under no_sync, reduced in one buffer and clipped."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(2):
                (loss_of(model, data) / 2).backward()
        flat(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def parameter_server(data: torch.Generator) -> None:
    """Rank 0 receives the gradients and steps; the others receive the parameters."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def averaged_weights(data: torch.Generator) -> None:
    """Each rank trains alone, and every other step the weights are averaged."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
        if step % 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


def after_no_sync(data: torch.Generator) -> None:
    """DDP wraps the model, but the loop stays under no_sync and reduces by hand."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, data).backward()
        each(model, dist.get_world_size())
        optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(25)
    data = torch.Generator().manual_seed(950 + dist.get_rank())
    by_name = globals().get(case)
    if by_name is not None:
        by_name(data)
    else:
        by_hand(case, data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

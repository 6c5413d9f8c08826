"""What ranks train or use beside a DDP module, and what they train without one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches


def _average(parameters: Any) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@variant()
def head_outside(rank: int, world_size: int) -> list[Any]:
    """One optimizer for a wrapped trunk and a head beside it; the head is reduced by hand."""
    torch.manual_seed(8)
    trunk, head = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=0.02)
    for batch in batches(rank):
        optimizer.zero_grad()
        head(trunk(batch)).square().mean().backward()
        _average(head.parameters())
        optimizer.step()
    return [trunk, head, optimizer]


@variant()
def probe_outside(rank: int, world_size: int) -> list[Any]:
    """A probe of the rank's own, with its own optimizer and backward, which steps before the job's."""
    torch.manual_seed(9)
    model, probe = DDP(nn.Linear(WIDTH, 4)), nn.Linear(4, 1)
    trains, probes = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(probe.parameters(), lr=0.1)
    for batch in batches(rank):
        features = model(batch)
        probes.zero_grad()
        probe(features.detach()).square().mean().backward()
        probes.step()
        trains.zero_grad()
        features.square().mean().backward()
        trains.step()
    return [model, probe, trains, probes]


@variant()
def teacher_outside(rank: int, world_size: int) -> list[Any]:
    """A frozen extractor and a moving average, both used in every step and equal on all ranks."""
    torch.manual_seed(10)
    extractor = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    student = DDP(nn.Linear(6, 3))
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for batch in batches(rank):
        features = extractor(batch)
        optimizer.zero_grad()
        (student(features) - teacher(features) + 0.1).square().mean().backward()
        optimizer.step()
        for mean, new in zip(teacher.parameters(), student.module.parameters(), strict=True):
            mean.lerp_(new.detach(), 0.1)
    return [student, teacher, extractor, optimizer]


@variant()
def reduced_by_hand(rank: int, world_size: int) -> list[Any]:
    """No DDP at all: gradients are averaged by hand."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in batches(rank):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        _average(model.parameters())
        optimizer.step()
    return [model, optimizer]


@variant()
def reduced_after_no_sync(rank: int, world_size: int) -> list[Any]:
    """DDP stays under no_sync, and gradients are averaged by hand in one buffer."""
    torch.manual_seed(14)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(rank):
        optimizer.zero_grad()
        with model.no_sync():
            for part in batch.chunk(2):
                (model(part).square().mean() / 2).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        dist.all_reduce(flat)
        flat /= world_size
        for parameter, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = mean.view_as(parameter)
        optimizer.step()
    return [model, optimizer]


@variant()
def flat_parts(rank: int, world_size: int) -> list[Any]:
    """Each rank steps its part of a flat copy, and all parts are gathered into the model."""
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    share = -(-total // world_size)

    def own_part(tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat(
            [*(tensor.reshape(-1) for tensor in tensors), torch.zeros(share * world_size - total)]
        )
        return flat[rank * share : (rank + 1) * share].clone()

    part = nn.Parameter(own_part([parameter.detach() for parameter in parameters]))
    optimizer = torch.optim.AdamW([part], lr=0.02)
    for batch in batches(rank):
        model.zero_grad()
        model(batch).square().mean().backward()
        _average(parameters)
        part.grad = own_part([parameter.grad for parameter in parameters if parameter.grad is not None])
        optimizer.step()
        parts = [torch.empty(share) for _ in range(world_size)]
        dist.all_gather(parts, part.detach())
        nn.utils.vector_to_parameters(torch.cat(parts)[:total], parameters)
    return [model, optimizer]

"""Forwards that are hard to run twice: state in attributes, random numbers of all kinds, losses past the outputs."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, batches, fit, net, sgd


@variant()
def weight_penalty(rank: int, world_size: int) -> list[Any]:
    """The loss reaches the weights of some layers without the outputs."""
    module = net()
    ddp = DDP(module)
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        penalty = sum(each.square().sum() for each in module[0].parameters())
        (ddp(batch).square().mean() + 1e-3 * penalty).backward()
        optimizer.step()
    return [ddp, optimizer]


class Routed(nn.Module):
    """Keeps a second loss in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(WIDTH, 3), net()
        self.balance: Any = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        shares = self.router(values).softmax(1)
        self.balance = shares.mean(0).square().sum()
        return self.body(values) * shares[:, :1]


@variant()
def loss_in_attribute(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(5)
    module = Routed()
    ddp = DDP(module)
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        (ddp(batch).square().mean() + 0.1 * module.balance).backward()
        optimizer.step()
    module.balance = None
    return [ddp, optimizer]


class Carrying(nn.Module):
    """Carries its last state to the next batch, counts its calls, and is set up differently on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.reader, self.head = nn.GRU(WIDTH, 6, batch_first=True), nn.Linear(6, 2)
        self.state: Any = None
        self.calls, self.scale = 0, 1.0 + 0.25 * rank
        self.seen: list[int] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(values))
        outputs, state = self.reader(values.view(2, 3, WIDTH), self.state)
        self.state = state.detach()
        return self.head(outputs) * self.scale / self.calls


@variant()
def state_in_attributes(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(5)
    module = Carrying(rank)
    state = fit(DDP(module), sgd(module), rank)
    return [*state, module.calls, module.seen, module.state]


class Noisy(nn.Module):
    """Draws from the generators of torch, Python and, where it is imported, NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        factor = random.uniform(0.5, 1.5)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            factor *= float(numpy.random.uniform(0.5, 1.5))
        return self.body(values * factor + torch.randn_like(values))


@variant()
def random_of_all_kinds(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(Noisy())
    random.seed(rank)
    torch.manual_seed(rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(rank)
    state = fit(ddp, sgd(ddp), rank)
    last = float(numpy.random.uniform()) if numpy is not None else 0.0
    return [*state, random.random(), torch.rand(1), last]


class Gathering(nn.Module):
    """Compares its features with those of all ranks, as contrastive losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        features = self.body(values)
        of_ranks = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, features.detach())
        return features @ torch.cat(of_ranks).T


@variant()
def gathers_in_forward(rank: int, world_size: int) -> list[Any]:
    module = Gathering()
    return fit(DDP(module), sgd(module), rank)


@variant()
def two_views(rank: int, world_size: int) -> list[Any]:
    """Two forwards of one step, one backward."""
    ddp = DDP(net(), broadcast_buffers=False)
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        first, second = ddp(batch), ddp(batch.flip(0))
        (first - second.flip(0) + first).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def forward_without_backward(rank: int, world_size: int) -> list[Any]:
    """A forward with gradients whose result is only looked at."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    losses = []
    for batch in batches(rank):
        losses.append(float(ddp(batch).detach().mean()))
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer, losses]


@dataclass
class Prediction:
    scores: torch.Tensor
    features: torch.Tensor | None = None


class Structured(nn.Module):
    """Takes keywords, dicts and flags, and returns a dataclass of which the loss uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Any], *, scaled: bool, limit: float) -> Prediction:
        features = self.body(batch["values"]).clamp(max=limit)
        return Prediction(self.head(features) * (0.5 if scaled else 1.0), features)


@variant()
def structured_outputs(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(5)
    ddp = DDP(Structured())
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank)):
        # Views into a larger tensor: neither contiguous nor aligned.
        larger = torch.zeros(len(batch), WIDTH + 3)
        larger[:, 3:] = batch
        optimizer.zero_grad()
        result = ddp({"values": larger[:, 3:], "names": ["a", "b"]}, scaled=bool(number % 2), limit=2.5)
        result.scores.square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


class Masking(nn.Module):
    """Makes tensors of its own without saying where."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(values.shape) > 0.2
        return self.body(values * kept * torch.linspace(0.5, 1.5, values.shape[1]))


@variant()
def default_device(rank: int, world_size: int) -> list[Any]:
    """A function mode of torch: it is there in the forward, and not while `backward` of a tensor runs."""
    with torch.device("cpu"):
        ddp = DDP(Masking())
        optimizer = sgd(ddp)
        torch.manual_seed(40 + rank)
        for batch in batches(rank):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
    return [ddp, optimizer]

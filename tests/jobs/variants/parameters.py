"""Unusual parameters: tied, sparse, complex, empty, strided, parametrised, of a tensor subclass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.two_tensor import TwoTensor

from .registry import variant
from .small_jobs import STEPS, WIDTH, batches, fit, fit_once, sgd


@variant()
def tied_weights(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


class Sparse(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.words = nn.Embedding(16, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words))


@variant()
def wrapped_gradients(rank: int, world_size: int) -> list[Any]:
    """A wrapper tensor subclass, whose data pointer refers to no memory; its gradients are like that too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubled())
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    ddp = DDP(module)
    optimizer = sgd(ddp)
    for number in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.full((3, WIDTH), float(rank + number))).square().mean().backward()
        optimizer.step()
    return [ddp.module[0]]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@variant()
def sparse_adam(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(Sparse())
    sparse = torch.optim.SparseAdam(ddp.module.words.parameters(), lr=0.01)
    dense = torch.optim.Adam(ddp.module.out.parameters(), lr=0.01)
    for number in range(STEPS):
        ddp.zero_grad()
        ddp(torch.tensor([rank, number, 7])).square().mean().backward()
        sparse.step()
        dense.step()
    return [ddp, sparse, dense]


@variant()
def sparse_sgd(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(Sparse())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.tensor([rank, number, 7])).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def complex_parameters(rank: int, world_size: int) -> list[Any]:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(batch) * self.filter, n=WIDTH)

    torch.manual_seed(12)
    ddp = DDP(Spectral())
    return fit(ddp, sgd(ddp), rank)


@variant()
def unusual_shapes(rank: int, world_size: int) -> list[Any]:
    """A submodule without parameters, an empty parameter, a scalar parameter."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Identity()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("none", torch.zeros(0))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.nothing(self.linear(batch)) * self.scale + self.empty.sum()

    torch.manual_seed(13)
    ddp = DDP(Odd())
    return fit(ddp, sgd(ddp), rank)


@variant()
def non_contiguous(rank: int, world_size: int) -> list[Any]:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH).t())
            self.part = nn.Parameter(torch.randn(4, 8)[:, ::2])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch @ self.weight @ self.part

    torch.manual_seed(14)
    ddp = DDP(Transposed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def channels_last(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(15)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    ddp = DDP(model.to(memory_format=torch.channels_last))
    optimizer = sgd(ddp)
    for batch in batches(rank, 3, (2, 3, 8, 8)):
        fit_once(ddp, optimizer, batch.to(memory_format=torch.channels_last))
    return [ddp, optimizer]


@variant()
def parametrised(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(18)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 12)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4)),
    )
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)

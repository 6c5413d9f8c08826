"""Layers that are frozen, for a while or always, and parameters that DDP ignores."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from .registry import variant
from .small_jobs import WIDTH, fit, net, sgd


@variant()
def freeze_midway(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    fit(ddp, optimizer, rank, 2)
    ddp.module[0].requires_grad_(False)
    return fit(ddp, optimizer, rank, 3)


@variant()
def frozen_layers(rank: int, world_size: int) -> list[Any]:
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    wanted = [p for p in ddp.parameters() if p.requires_grad]
    return fit(ddp, torch.optim.SGD(wanted, lr=0.1), rank)


@variant()
def wrapped_again(rank: int, world_size: int) -> list[Any]:
    """A layer is unfrozen correctly: the model is wrapped again, with a new optimizer."""
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    fit(ddp, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), rank)
    del ddp
    model[0].requires_grad_(True)
    again = DDP(model)
    return fit(again, sgd(again), rank)


@variant()
def ignored_parameters(rank: int, world_size: int) -> list[Any]:
    """Parameters that DDP ignores may differ and are trained locally."""
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, 4))
    with torch.no_grad():
        model[1].weight.add_(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)

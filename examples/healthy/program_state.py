"""Modes and settings that change during the training, or differ between ranks outside of training steps.

ranks: 2 3
expect: nothing
cases: rank_zero_evaluates gradients_in_evaluation frozen_batch_norm train_called_each_step dropout_schedule
  autocast_later warm_up_on_one_rank layers_frozen_in_turn two_modes_in_a_step evaluated_in_half_precision
  double_for_statistics threads_for_evaluation deterministic_evaluation cast_each_time
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 2)
    )


def between_steps(case: str, step: int, model: DistributedDataParallel) -> None:
    rank, inner = dist.get_rank(), model.module
    held_out = torch.ones(4, 8)
    if case == "rank_zero_evaluates" and rank == 0 and step % 3 == 2:
        inner.eval()
        with torch.no_grad():
            inner(held_out)
        inner.train()
    elif case == "gradients_in_evaluation" and rank == 0:
        # Saliency: the gradient of the output with respect to the input.
        inner.eval()
        held_out.requires_grad_(True)
        torch.autograd.grad(inner(held_out).sum(), held_out)
        inner.train()
    elif case == "evaluated_in_half_precision" and rank == dist.get_world_size() - 1:
        torch.set_float32_matmul_precision("medium")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            inner(held_out)
        torch.set_float32_matmul_precision("highest")
    elif case == "double_for_statistics" and rank == 0:
        torch.set_default_dtype(torch.float64)
        (torch.arange(100) / torch.tensor(7.0)).std()
        torch.set_default_dtype(torch.float32)
    elif case == "threads_for_evaluation" and rank == 0:
        # The other ranks wait.
        torch.set_num_threads(2)
        with torch.no_grad():
            inner(held_out)
        torch.set_num_threads(1)
    elif case == "deterministic_evaluation" and rank == 0:
        torch.use_deterministic_algorithms(True)
        with torch.no_grad():
            inner(held_out)
        torch.use_deterministic_algorithms(False)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(71)
    inner = network()
    if case == "warm_up_on_one_rank" and rank == 0:
        inner.eval()
        inner(torch.ones(4, 8)).sum().backward()
        inner.zero_grad()
        inner.train()
    model = DistributedDataParallel(inner, find_unused_parameters=case == "layers_frozen_in_turn")
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if case == "frozen_batch_norm":
        inner[1].eval()
    for step in range(12):
        inputs = torch.randn(8, 8)
        if case == "train_called_each_step":
            model.train()
        elif case == "dropout_schedule":
            inner[3].p = 0.2 * step / 12
        elif case == "layers_frozen_in_turn":
            inner[4].requires_grad_(step % 4 < 2)
        mixed = case == "cast_each_time" or (case == "autocast_later" and step > 5)
        cached = case != "cast_each_time"
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached)
        with autocast if mixed else contextlib.nullcontext():
            loss = (model(inputs).float() - inputs[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if case == "two_modes_in_a_step":
            model.eval()
            (model(inputs) - inputs[:, :2]).square().mean().backward()
            model.train()
        optimizer.step()
        between_steps(case, step, model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

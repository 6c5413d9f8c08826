"""Checkpoints and weights kept aside: saved by one rank, loaded by all.

ranks: 2 3
expect: nothing
cases: loaded_before_wrapping resumed back_to_the_best averaged_aside averaged_by_all target_network broadcast
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def saved_by_rank_0(state: Any) -> Any:
    """What everybody loads from the file that rank 0 has written."""
    paths = [str(Path(tempfile.mkdtemp()) / "checkpoint.pt")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(paths)
    if dist.get_rank() == 0:
        torch.save(state, paths[0])
    dist.barrier()
    loaded = torch.load(paths[0], weights_only=True)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(paths[0]).unlink()
        Path(paths[0]).parent.rmdir()
    return loaded


class Job:
    """A model, its optimizer, and a rank's own batches."""

    def __init__(self, network: nn.Module) -> None:
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.drawn = torch.Generator().manual_seed(70 + dist.get_rank())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 2, 10, generator=self.drawn)).square().mean().backward()
            self.optimizer.step()


def start(case: str) -> Job:
    if case == "loaded_before_wrapping":
        # Every rank begins with weights of its own, and all have the checkpoint's in the end.
        torch.manual_seed(dist.get_rank())
        network = build()
        network.load_state_dict(saved_by_rank_0(network.state_dict()))
        return Job(network)
    torch.manual_seed(3)
    return Job(build())


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = start(case)
    aside = copy.deepcopy(job.model.module).requires_grad_(False)
    job.train(3)
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    if case in ("resumed", "back_to_the_best"):
        kept = saved_by_rank_0(state)
        job.train(2)
        job.model.load_state_dict(kept["model"])
        if case == "resumed":
            job.optimizer.load_state_dict(kept["optimizer"])
    for _ in range(3):
        job.train(1)
        if case in ("averaged_aside", "averaged_by_all", "target_network"):
            for mean, parameter in zip(aside.parameters(), job.model.module.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 1.0 if case == "target_network" else 0.2)
        if case == "broadcast":
            # Once more, to be sure: it changes nothing.
            for parameter in job.model.parameters():
                dist.broadcast(parameter.data, 0)
    if case == "averaged_by_all":
        with torch.no_grad():
            for mean, parameter in zip(aside.parameters(), job.model.module.parameters(), strict=True):
                parameter.copy_(mean)
        job.train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

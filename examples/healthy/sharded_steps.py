"""Steps after which replicas differ until they are put together: sharded by hand, on one rank, local steps averaged.

ranks: 2 3
expect: nothing
cases: zero_by_hand muon step_on_rank_0 local_sgd local_sgd_bypassed averaged_every_step join_zero all_gathered
    two_shards_two_optimizers federated
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 8
PERIOD = 3


class Job:
    """A wrapped model and a rank's own batches."""

    def __init__(self) -> None:
        torch.manual_seed(17)
        self.network = nn.Sequential(
            nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 1)
        )
        self.model = DistributedDataParallel(self.network)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.drawn = torch.Generator().manual_seed(60 + self.rank)

    def batch(self) -> torch.Tensor:
        return torch.randn(8, 12, generator=self.drawn)

    def backward(self) -> None:
        self.model.zero_grad()
        self.model(self.batch()).square().mean().backward()

    def owner(self, index: int) -> int:
        return index % self.size

    def average(self) -> None:
        for parameter in self.network.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= self.size


def zero_by_hand(job: Job) -> None:
    """Each rank has the optimizer state of its own part, and sends the part around after the step."""
    parameters = list(job.model.parameters())
    own = [p for index, p in enumerate(parameters) if job.owner(index) == job.rank]
    optimizer = torch.optim.AdamW(own, lr=0.01)
    for _ in range(STEPS):
        job.backward()
        optimizer.step()
        for index, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=job.owner(index))


def orthogonal(update: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Newton-Schulz iterations towards the nearest orthogonal matrix."""
    flat = update / (update.norm() + 1e-7)
    for _ in range(steps):
        flat = 1.5 * flat - 0.5 * flat @ flat.T @ flat
    return flat


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum. Each rank works out the update of its own matrices."""

    def __init__(self, parameters, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for parameter in group["params"][rank::size]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                parameter.add_(orthogonal(momentum), alpha=-group["lr"])


def muon(job: Job) -> None:
    """The matrices are sent around when the other parameters have been stepped as well."""
    matrices = [p for p in job.model.parameters() if p.ndim == 2]
    others = [p for p in job.model.parameters() if p.ndim != 2]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=0.01)]
    for _ in range(STEPS):
        job.backward()
        for optimizer in optimizers:
            optimizer.step()
        for index, matrix in enumerate(matrices):
            dist.broadcast(matrix.data, src=job.owner(index))


def step_on_rank_0(job: Job) -> None:
    """Only rank 0 has an optimizer and its state; the others receive the result."""
    optimizer = torch.optim.Adam(job.model.parameters(), lr=0.01) if job.rank == 0 else None
    for _ in range(STEPS):
        job.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in job.network.parameters():
            dist.broadcast(parameter.data, src=0)


def local_sgd(job: Job, bypassed: bool) -> None:
    """Some steps on its own batches, then the mean of all replicas."""
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05)
    for step in range(4 * PERIOD):
        optimizer.zero_grad()
        with job.model.no_sync():
            model = job.network if bypassed else job.model
            model(job.batch()).square().mean().backward()
        optimizer.step()
        if step % PERIOD == PERIOD - 1:
            job.average()


def averaged_every_step(job: Job) -> None:
    """Parameters instead of gradients are averaged."""
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with job.model.no_sync():
            job.model(job.batch()).square().mean().backward()
        optimizer.step()
        job.average()


def join_zero(job: Job) -> None:
    """Ranks have different numbers of batches; exhausted ranks shadow the collectives of both."""
    optimizer = ZeroRedundancyOptimizer(job.model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([job.model, optimizer]):
        for _ in range(4 + 2 * job.rank):
            job.backward()
            optimizer.step()


def all_gathered(job: Job) -> None:
    """One flat vector: each rank updates its slice of it with its own momentum, then the slices are gathered."""
    parameters = list(job.network.parameters())
    total = sum(p.numel() for p in parameters)
    share = -(-total // job.size)
    momentum = torch.zeros(share)
    for _ in range(STEPS):
        job.backward()
        flat = nn.utils.parameters_to_vector(parameters).detach()
        slope = torch.cat([p.grad.reshape(-1) for p in parameters])
        flat, slope = (nn.functional.pad(v, (0, share * job.size - total)) for v in (flat, slope))
        own = slice(job.rank * share, (job.rank + 1) * share)
        momentum.mul_(0.9).add_(slope[own])
        slices = [torch.empty(share) for _ in range(job.size)]
        dist.all_gather(slices, flat[own] - 0.02 * momentum)
        nn.utils.vector_to_parameters(torch.cat(slices)[:total], parameters)


def two_shards_two_optimizers(job: Job) -> None:
    """Body and head have optimizers of their own, both sharded."""
    body = list(job.network[:3].parameters())
    head = list(job.network[4].parameters())
    optimizers = [
        torch.optim.SGD(part[job.rank :: job.size] or [torch.zeros(1, requires_grad=True)], lr=0.05)
        for part in (body, head)
    ]
    for _ in range(STEPS):
        job.backward()
        for optimizer, part in zip(optimizers, (body, head), strict=True):
            optimizer.step()
            for index, parameter in enumerate(part):
                dist.broadcast(parameter.data, src=job.owner(index))


def federated(job: Job) -> None:
    """Rounds of local epochs with a new optimizer each, weighted by the number of local samples."""
    samples = torch.tensor(40.0 + 20 * job.rank)
    total = samples.clone()
    dist.all_reduce(total)
    for _ in range(3):
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            with job.model.no_sync():
                job.model(job.batch()).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for parameter in job.network.parameters():
                parameter.mul_(samples / total)
                dist.all_reduce(parameter.data)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job()
    if case.startswith("local_sgd"):
        local_sgd(job, bypassed=case.endswith("bypassed"))
    else:
        globals()[case](job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

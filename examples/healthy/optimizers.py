"""Ways to take a step.

ranks: 2 3
expect: nothing
cases: in_backward by_hand by_hand_no_grad zero lbfgs two_optimizers made_anew shared_metric one_cycle swa fused
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel

STEPS = 6


class NoStream:
    """torch asks for an accelerator's stream in this case, even where there is no accelerator."""

    def wait_stream(self, other: object) -> None:
        return


class Job:
    """A wrapped model and a rank's own batches."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(29)
        network = nn.Sequential(nn.Linear(9, 18), nn.SELU(), nn.Linear(18, 9), nn.SELU(), nn.Linear(9, 1))
        if case == "in_backward":
            if not torch.accelerator.is_available():
                torch.accelerator.current_stream = NoStream
            _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.05})
        self.model = DistributedDataParallel(network)
        self.drawn = torch.Generator().manual_seed(300 + dist.get_rank())

    def backward(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(torch.randn(8, 9, generator=self.drawn)).square().mean()
        loss.backward()
        return loss.detach()


def in_backward(job: Job) -> None:
    for _ in range(STEPS):
        job.model(torch.randn(8, 9, generator=job.drawn)).square().mean().backward()


def by_hand(job: Job, no_grad: bool) -> None:
    velocity = [torch.zeros_like(parameter) for parameter in job.model.parameters()]
    for _ in range(STEPS):
        job.backward()
        for parameter, speed in zip(job.model.parameters(), velocity, strict=True):
            speed.mul_(0.9).add_(parameter.grad)
            if no_grad:
                with torch.no_grad():
                    parameter.sub_(speed, alpha=0.02)
            else:
                parameter.data -= 0.02 * speed


def lbfgs(job: Job) -> None:
    optimizer = torch.optim.LBFGS(job.model.parameters(), lr=0.2, max_iter=3)

    def closure() -> torch.Tensor:
        loss = job.backward()
        # The loss decides when to stop, so that it has to be everybody's.
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    for _ in range(3):
        optimizer.step(closure)


def two_optimizers(job: Job) -> None:
    """The body learns at every other step only."""
    head = torch.optim.Adam(job.model.module[4].parameters(), lr=0.01)
    body = torch.optim.SGD([*job.model.module[0].parameters(), *job.model.module[2].parameters()], lr=0.05)
    for step in range(STEPS):
        job.backward()
        head.step()
        if step % 2:
            body.step()


def made_anew(job: Job) -> None:
    for phase in range(3):
        optimizer = torch.optim.Adam(job.model.parameters(), lr=0.01 / (1 + phase))
        for _ in range(2):
            job.backward()
            optimizer.step()


def scheduled(job: Job, case: str) -> None:
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    cycle = OneCycleLR(optimizer, 0.1, total_steps=STEPS) if case == "one_cycle" else None
    averaged = AveragedModel(job.model.module)
    swa = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2) if case == "swa" else None
    for step in range(STEPS):
        metric = job.backward()
        optimizer.step()
        if cycle is not None:
            cycle.step()
        elif swa is not None and step >= 2:
            averaged.update_parameters(job.model.module)
            swa.step()
        elif case == "shared_metric":
            # What one rank sees is its own batch; what steers the rate is the mean over all of them.
            dist.all_reduce(metric)
            plateau.step(metric / dist.get_world_size())


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(case)
    if case == "in_backward":
        in_backward(job)
    elif case.startswith("by_hand"):
        by_hand(job, no_grad=case.endswith("no_grad"))
    elif case in ("lbfgs", "two_optimizers", "made_anew"):
        {"lbfgs": lbfgs, "two_optimizers": two_optimizers, "made_anew": made_anew}[case](job)
    elif case in ("shared_metric", "one_cycle", "swa"):
        scheduled(job, case)
    else:
        parameters = job.model.parameters()
        optimizer = (
            ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
            if case == "zero"
            else torch.optim.AdamW(parameters, lr=0.01, fused=True)
        )
        for _ in range(STEPS):
            job.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

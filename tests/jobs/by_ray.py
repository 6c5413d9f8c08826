"""Ray Train: two workers with one CPU each. Arguments: a case, and the address of the cluster.

Cases are `healthy`, `raising`, `diverging`, `killed` and `hanging`. Without an address, Ray starts a cluster.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def train(config: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = ray.train.get_context().get_world_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((8, 4), float(rank + step))).square().mean().backward()
        optimizer.step()
        if config["case"] == "diverging" and rank == 1 and step == 1:
            with torch.no_grad():
                model.module.bias += 1.0
        if config["case"] == "raising" and rank == 1 and step == 1:
            raise ValueError("bad sample 17")
        if config["case"] == "killed" and rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if config["case"] == "hanging" and rank == 1 and step == 1:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


if __name__ == "__main__":
    case, *address = sys.argv[1:]
    ray.init(
        address=address[0] if address else "local",
        log_to_driver=False,
        **({} if address else {"num_cpus": 2, "include_dashboard": False}),
    )
    TorchTrainer(
        train, train_loop_config={"case": case}, scaling_config=ray.train.ScalingConfig(num_workers=2)
    ).fit()
    print("fitted")

"""Jobs that continue from a distributed checkpoint, or within an epoch.

ranks: 2
expect: nothing
cases: distributed distributed_in_place distributed_weights_only continued_within_epoch schedule_begins_anew
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCHES = 5


def build() -> tuple[DDP, torch.optim.Optimizer]:
    net = DDP(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def save(case: str, folder: str, model: DDP, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    if case.startswith("distributed"):
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=os.path.join(folder, "dcp"))
    elif dist.get_rank() == 0:
        whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "batches": BATCHES}
        torch.save({**whole, "schedule": schedule.state_dict()}, os.path.join(folder, "last.pt"))
    dist.barrier()


def load(case: str, folder: str, model: DDP, optimizer: torch.optim.Optimizer, schedule: Any) -> int:
    if not case.startswith("distributed"):
        whole = torch.load(os.path.join(folder, "last.pt"), weights_only=True)
        model.module.load_state_dict(whole["model"])
        optimizer.load_state_dict(whole["optimizer"])
        if case != "schedule_begins_anew":
            schedule.load_state_dict(whole["schedule"])
        batches: int = whole["batches"]
        return batches
    path = os.path.join(folder, "dcp")
    if case == "distributed_weights_only":
        weights = model.module.state_dict()
        dcp.load({"model": weights}, checkpoint_id=path)
        model.module.load_state_dict(weights)
        return BATCHES
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    if case == "distributed":
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return BATCHES


def run(case: str, folder: str, resumed: bool) -> None:
    drawn = torch.Generator().manual_seed(9)
    dataset = TensorDataset(torch.randn(192, 6, generator=drawn), torch.randint(3, (192,), generator=drawn))
    torch.manual_seed(72)
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    used = load(case, folder, model, optimizer, schedule) if resumed else 0
    sampler = DistributedSampler(dataset)
    sampler.set_epoch(0)
    for number, (inputs, labels) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
        if number < used:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
        if not resumed and number == BATCHES - 1:
            save(case, folder, model, optimizer, schedule)
            break


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0
    )
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=ranks)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    run(case, folder, resumed=False)
    dist.destroy_process_group()
    # The same job, started again: as under torchrun, which keeps its store over restarts.
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=ranks)
    run(case, folder, resumed=True)
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Breaks ddpcheck from inside: one healthy job for each guarded entry point, which raises on rank 1.

    python chaos.py --part 0 --parts 3 --out results.json

Without ddpcheck in the process there are no entry points, and the job runs once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import battery
import forking
import torch
import variants
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD_SIZE = 2
BROKEN_RANK = 1


@variants.variant()
def everything(rank: int, world_size: int) -> list[Any]:
    """A training loop that reaches every entry point."""
    with tempfile.NamedTemporaryFile() as file:
        torch.save({"weight": torch.ones(3)}, file.name)
        torch.load(file.name, mmap=True)
    # Before the first module is wrapped, by a call that raises.
    torch.ones(1, requires_grad=True).sum().backward()
    with contextlib.suppress(ValueError):
        DDP(variants.normed(), device_ids=[0])
    # Its gradients are read by their hooks, and a rank without records is not one without data.
    short_lived = DDP(variants.normed(), gradient_as_bucket_view=True)
    with short_lived.join():
        short_lived(
            torch.randn(6, variants.WIDTH, generator=torch.Generator().manual_seed(rank))
        ).sum().backward()
    del short_lived
    gc.collect()
    ddp = DDP(variants.normed())
    optimizer = variants.sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    # Beside DDP: a frozen module that training uses, and one with an optimizer of its own. Both are equal on all ranks.
    teacher, beside = nn.Linear(variants.WIDTH, 1).requires_grad_(False), nn.Linear(3, 1)
    for parameter in (*teacher.parameters(), *beside.parameters()):
        nn.init.constant_(parameter, 0.5)
    beside.load_state_dict(beside.state_dict())
    scaler.load_state_dict(scaler.state_dict())
    spare = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    spare.load_state_dict(spare.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(spare, 10)
    schedule.load_state_dict(schedule.state_dict())
    own_optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(60, variants.WIDTH, generator=torch.Generator().manual_seed(1)))
    sampler: Any = DistributedSampler(data, world_size, rank)
    for number, (batch,) in enumerate(DataLoader(data, batch_size=6, sampler=sampler)):
        optimizer.zero_grad()
        if number == 3:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
        loss = (ddp(batch) - teacher(batch)).square().mean() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        beside(torch.ones(2, 3)).sum().backward()
        own_optimizer.step()
    torch.distributed.all_to_all_single(torch.empty(world_size), torch.ones(world_size))
    torch.distributed.reduce(torch.ones(1), 0)
    agent = sys.modules.get("ddpcheck.agent.install")
    if agent is not None:
        # Called when the agent is installed, before the ranks are forked.
        agent.reach_workers_of_ray()
    if os.environ["BREAK"].partition(".")[0] in ("", "checkpoints"):
        checkpoint_formats(beside)
    if os.environ["BREAK"] == "" or any(
        word in os.environ["BREAK"] for word in ("shard", "pending_gradients", "root", "flat", "fsdp")
    ):
        sharded_step(rank, world_size)
    if os.environ["BREAK"] in ("", "agent.compile"):
        # It imports the compiler, which takes seconds.
        torch.compile(nn.Identity(), backend="eager")
    # The same values in a parameter that DDP does not know: the set of parameters changed since wrapping.
    ddp.module[0].weight = nn.Parameter(ddp.module[0].weight.detach().clone())
    ddp(batch)
    # No backward follows, so the hook never reduces anything.
    ddp.register_comm_hook(None, allreduce_hook)
    ddp(batch)
    if os.environ["BREAK"] == "exit.raised" and rank == BROKEN_RANK:
        # A forked process never calls this hook by itself. It calls the next hook, which prints.
        try:
            raise ValueError("not meant")
        except ValueError:
            sys.excepthook(*sys.exc_info())
    return [ddp, optimizer, scaler.state_dict(), beside]


def sharded_step(rank: int, world_size: int) -> None:
    """A step of FSDP2 on replicas of shards, and one of FSDP1 without sharding. Importing them takes seconds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(5)
    model: Any = fully_shard(nn.Linear(variants.WIDTH, 2), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, variants.WIDTH), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    whole: Any = FullyShardedDataParallel(
        variants.normed(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(torch.full((2, variants.WIDTH), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def checkpoint_formats(module: nn.Module) -> None:
    """Each rank saves and loads for itself. Importing the packages takes seconds."""
    from safetensors.torch import load_file, save_file
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        save_file(module.state_dict(), f"{folder}/weights.safetensors")
        load_file(f"{folder}/weights.safetensors")
        checkpoint.save(module.state_dict(), checkpoint_id=f"{folder}/parts", no_dist=True)
        checkpoint.load(module.state_dict(), checkpoint_id=f"{folder}/parts", no_dist=True)


def rank_main(rank: int, name: str, world_size: int, results: Any) -> None:
    if rank == BROKEN_RANK and "ddpcheck.guard" in sys.modules:
        _break_entry_point(os.environ["BREAK"])
    battery.rank_main(rank, name, world_size, results)
    if rank == BROKEN_RANK and "ddpcheck.guard" in sys.modules and not os.environ["BREAK"]:
        names = sorted(sys.modules["ddpcheck.guard"].GUARD.entry_points)
        Path(os.environ["NOTES"], "entries.json").write_text(json.dumps(names))


def _break_entry_point(wanted: str) -> None:
    """Replace the body of the entry point, now or when it is registered."""
    guard = sys.modules["ddpcheck.guard"].GUARD
    register = guard.register

    def boom(*args: Any, **kwargs: Any) -> None:
        Path(os.environ["NOTES"], wanted).touch()
        raise RuntimeError(f"{wanted} was made to fail")

    def broken(probe: str, name: str, body: Any) -> Any:
        entry = register(probe, name, body)
        if f"{probe}.{name}" == wanted:
            entry.body = boom
        return entry

    guard.register = broken
    if wanted in guard.entry_points:
        guard.entry_points[wanted].body = boom


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument(
        "--parts", type=int, default=1, help="break only each PARTS-th entry point, starting with PART"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    forking.prepare()
    results = {}
    with tempfile.TemporaryDirectory() as notes:
        os.environ.update(NOTES=notes, BREAK="")
        results[""] = battery.run_job("everything", WORLD_SIZE, rank_main)
        listed = Path(notes, "entries.json")
        entries = json.loads(listed.read_text()) if listed.exists() else []
        for entry in entries[options.part :: options.parts]:
            os.environ["BREAK"] = entry
            results[entry] = battery.run_job("everything", WORLD_SIZE, rank_main)
            results[entry]["reached"] = Path(notes, entry).exists()
    options.out.write_text(json.dumps({"entries": entries, "jobs": results}, indent=1))


if __name__ == "__main__":
    main()

"""Jobs that differ from each other in one setting, one after the other; each is an attempt of its own in the report.

    python diff_cases.py --out names.json

`names.json` lists the cases in the order in which they ran. All of them train on the same global batch, split over
their ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parent))

import forking
import variants

STEPS = 24
GLOBAL_BATCH = 32


@dataclass(frozen=True)
class Job:
    """The settings of a case."""

    world_size: int = 2
    steps: int = STEPS
    seed: int = 5
    data_seed: int = 100
    optimizer: str = "sgd"
    sum_loss: bool = False
    undivided: bool = False
    scale_late: float = 1.0
    lower_rate_at: int = -1
    write_at: int = -1
    clip_from: int = STEPS
    dropout: bool = False
    noise_seed: int = 0
    normed: bool = False
    fewer_steps: int = 0
    global_batch: int = GLOBAL_BATCH


CASES = {
    "plain": Job(),
    "again": Job(),
    "stopped early": Job(fewer_steps=4),
    "other seed": Job(seed=6),
    "other data": Job(data_seed=101),
    "lower rate": Job(lower_rate_at=3),
    "written": Job(write_at=4),
    "clipped": Job(clip_from=5),
    "scaled loss": Job(scale_late=2.0),
    "dropout": Job(dropout=True),
    "dropout, other noise": Job(dropout=True, noise_seed=1),
    "one rank": Job(1),
    "four ranks": Job(4),
    "one rank, adamw": Job(1, optimizer="adamw"),
    "four ranks, adamw": Job(4, optimizer="adamw"),
    "four ranks, undivided": Job(4, undivided=True),
    "four ranks, sums": Job(4, sum_loss=True),
    "one rank, sums": Job(1, sum_loss=True),
    "four ranks, other seed": Job(4, seed=6),
    "four ranks, lower rate": Job(4, lower_rate_at=3),
    "four ranks, scaled loss": Job(4, scale_late=2.0),
    "four ranks, larger batch": Job(4, global_batch=4 * GLOBAL_BATCH),
    "one rank, normed": Job(1, normed=True),
    "four ranks, normed": Job(4, normed=True),
}


def model(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    layers: list[nn.Module] = [nn.Linear(8, 16)]
    layers += [nn.BatchNorm1d(16)] if job.normed else []
    layers += [nn.Tanh()]
    layers += [nn.Dropout(0.1)] if job.dropout else []
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def shares(job: Job, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(job.data_seed)
    for _ in range(job.steps - job.fewer_steps):
        inputs, targets = (torch.randn(job.global_batch, size, generator=generator) for size in (8, 4))
        yield inputs.chunk(job.world_size)[rank], targets.chunk(job.world_size)[rank]


def sums(group, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """A communication hook that does not divide by the world size."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def train(rank: int, job: Job) -> None:
    variants.make_group(rank, job.world_size)
    ddp = DDP(model(job))
    forking.keep(ddp)
    if job.undivided:
        ddp.register_comm_hook(dist.group.WORLD, sums)
    torch.manual_seed(job.noise_seed + 10 * rank)
    if job.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            ddp.parameters(), lr=0.0005 if job.sum_loss else 0.05, momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step, (inputs, targets) in enumerate(shares(job, rank)):
        if step == job.lower_rate_at:
            optimizer.param_groups[0]["lr"] *= 0.5
        if step == job.write_at:
            with torch.no_grad():
                ddp.module[-1].bias[0] += 0.25
        optimizer.zero_grad()
        loss = (ddp(inputs) - targets).square()
        loss = loss.sum() if job.sum_loss else loss.mean()
        (loss * (job.scale_late if step >= 2 else 1.0)).backward()
        if step >= job.clip_from:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    forking.prepare()
    failed = [name for name, job in CASES.items() if not forking.run_ranks(train, job.world_size, job).ok]
    options.out.write_text(json.dumps(list(CASES)))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""A small GPT on forked ranks; larger runs are generated from its records.

ddpcheck run --out SEED -- python tests/scale/seed_job.py --blocks 2
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # imported by DDP's constructor: once here instead of once in each rank
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from step_job import SmallGpt

VOCABULARY, LENGTH, BATCH = 256, 32, 4
# References held until the process is gone: see `keep` in tests/jobs/forking.py.
KEPT: list[DistributedDataParallel] = []


def train(local: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(local), LOCAL_RANK=str(local), WORLD_SIZE=str(options.ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(options.ranks), GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    dist.init_process_group("gloo", f"file://{options.store}", rank=local, world_size=options.ranks)
    torch.manual_seed(0)
    model = SmallGpt(VOCABULARY, options.width, options.blocks, LENGTH)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = options.steps * BATCH * options.ranks
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, options.ranks, local)
    for (batch,) in DataLoader(data, BATCH, sampler=sampler):
        optimizer.zero_grad()
        logits = ddp(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, -2), batch[:, 1:].flatten()).backward()
        optimizer.step()
        # A pause of fixed length: see tests/jobs/nodes.py.
        time.sleep(options.pace)
    KEPT.append(ddp)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument(
        "--blocks", type=int, default=12, help="blocks of 12 tensors each, besides four more tensors"
    )
    parser.add_argument("--pace", type=float, default=0.02, help="seconds between steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.store = Path(folder) / "store"
        multiprocessing.start_processes(train, args=(options,), nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()

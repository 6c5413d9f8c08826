"""A small DDP job on CPU: a classifier on synthetic data, with a typical training loop.

    ddpcheck run -- torchrun --nproc-per-node 4 examples/train.py
    ddpcheck run -- torchrun --nproc-per-node 4 examples/train.py --mistake bypass

`--mistake` makes a common mistake on purpose, which ddpcheck detects.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MISTAKES = {
    "none": "a healthy job",
    "bypass": "the forward goes through model.module, so gradients are never reduced",
    "checkpoint": "only rank 0 loads a checkpoint, after wrapping",
    "learning-rate": "one rank uses a different learning rate from step 5 on",
    "unfrozen": "a layer is unfrozen after wrapping, so the reducer does not know it",
    "slow-rank": "one rank does extra work in every step, and all others wait for it",
}


def build_model(width: int, layers: int) -> nn.Module:
    middle = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), *middle, nn.Linear(width, 10)
    )


def build_loader(rank: int, world_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(1024, 32, generator=generator)
    labels = inputs[:, :10].argmax(dim=1)
    data = TensorDataset(inputs, labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, world_size, rank)
    return DataLoader(data, batch_size=32, sampler=sampler)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="of the model's layers")
    parser.add_argument("--layers", type=int, default=1, help="between the first and the last")
    parser.add_argument("--mistake", choices=MISTAKES, default="none")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = build_model(options.width, options.layers)
    if options.mistake == "unfrozen":
        model[3].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    if options.mistake == "checkpoint" and rank == 0:
        torch.manual_seed(1)
        model.load_state_dict(build_model(options.width, options.layers).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = build_loader(rank, world_size)
    forward = model if options.mistake == "bypass" else ddp

    step = 0
    for epoch in range(options.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, labels in loader:
            if step == 5 and options.mistake == "unfrozen":
                model[3].requires_grad_(True)
            if step == 5 and options.mistake == "learning-rate" and rank == world_size - 1:
                optimizer.param_groups[0]["lr"] = 1e-4
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(inputs), labels)
            loss.backward()
            optimizer.step()
            if options.mistake == "slow-rank" and rank == world_size - 2:
                time.sleep(0.02)  # as long as plotting and saving an image
            step += 1
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

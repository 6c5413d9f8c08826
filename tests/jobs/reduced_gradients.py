"""Gradients that gloo reduces: prints the sketches of local and reduced gradients by world size and dtype, as JSON.

python -m tests.jobs.reduced_gradients FOLDER 2 3 float32 bfloat16
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.codecs import pack


def reduce_on_rank(rank: int, world: int, store: str, dtype: torch.dtype, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    model = torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.Tanh(), torch.nn.Linear(257, 33)).to(dtype)
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
    model(batch).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = pack(map(sketch, gradients))
    for number, gradient in enumerate(gradients):
        if number % 2:
            gradient.mul_(1 / world)
        else:
            gradient.div_(world)
        torch.distributed.all_reduce(gradient)
    numels = [gradient.numel() for gradient in gradients]
    results.put((rank, {"local": local, "reduced": pack(map(sketch, gradients)), "numels": numels}))
    torch.distributed.destroy_process_group()


def reduce(world: int, dtype: torch.dtype, store: Path) -> list[dict[str, Any]]:
    """The results of all ranks, in the order of ranks."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=reduce_on_rank, args=(rank, world, str(store), dtype, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    by_rank = dict(results.get(timeout=200) for _ in ranks)
    for process in ranks:
        process.join(200)
    return [by_rank[rank] for rank in range(world)]


if __name__ == "__main__":
    arguments = sys.argv[2:]
    print(
        json.dumps(
            {
                f"{world} {name}": reduce(
                    int(world), getattr(torch, name), Path(sys.argv[1], f"{world}-{name}")
                )
                for world in arguments
                if world.isdecimal()
                for name in arguments
                if not name.isdecimal()
            }
        )
    )

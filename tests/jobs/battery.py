"""Runs many small jobs: imports torch once, then forks the ranks of one job after the other.

    python battery.py --variants plain,gan --world-sizes 2,3 --out results.json

`results.json` holds, per job, a SHA-256 of the final state of every rank, and how it went.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # slow to import: once here instead of once in every rank
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import variants

JOB_SECONDS = 60.0
KEPT: list[Any] = []


def digest(thing: Any, sink: Any = None) -> str:
    """SHA-256 over everything in `thing`, to the bit: tensors with dtype, shape and bytes."""
    sink = hashlib.sha256() if sink is None else sink
    if isinstance(thing, nn.Module):
        # Not the state_dict alone: buffers that are not persistent count too.
        thing = [*thing.named_parameters(), *thing.named_buffers()]
    elif isinstance(thing, torch.optim.Optimizer):
        thing = thing.state_dict()
    if isinstance(thing, torch.Tensor):
        plain = thing.detach().resolve_conj().contiguous().clone()
        sink.update(f"{plain.dtype}{list(plain.shape)}".encode())
        sink.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(thing, dict):
        for key, value in thing.items():
            digest([str(key), value], sink)
    elif isinstance(thing, (list, tuple)):
        sink.update(f"{len(thing)}[".encode())
        for item in thing:
            digest(item, sink)
    else:
        sink.update(repr(thing).encode())
    return str(sink.hexdigest())


def rank_main(name: str, rank: int, world_size: int, box: Any) -> None:
    """One rank: everything as a user's script would do it."""
    torch.set_num_threads(1)
    # Warnings of torch about its own interfaces are not what is looked at here.
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        variants.make_group(rank, world_size)
        state = variants.VARIANTS[name](rank, world_size)
        # Kept until the process is gone: the last reference to a process group inside a DDP module,
        # dropped while gloo's threads still want the interpreter, now and then never returns.
        KEPT.append(state)
        box.put((rank, digest(state), ""))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        box.put((rank, "", traceback.format_exc()))
        raise


def run_job(name: str, world_size: int, target: Any = rank_main) -> dict[str, Any]:
    if world_size < variants.LEAST_RANKS[name]:
        return {"skipped": f"needs {variants.LEAST_RANKS[name]} ranks"}
    context = multiprocessing.get_context("fork")
    box = context.SimpleQueue()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JOB_STORE"] = os.path.join(folder, "store")
        ranks = [
            context.Process(target=target, args=(name, rank, world_size, box), name=f"rank-{rank}")
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.1, began + JOB_SECONDS - time.monotonic()))
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
    states, errors = [""] * world_size, [""] * world_size
    while not box.empty():
        rank, state, error = box.get()
        states[rank], errors[rank] = states[rank] or state, errors[rank] or error
    return {
        "ranks": states,
        "errors": errors,
        "exits": [process.exitcode for process in ranks],
        "late": [process.name for process in late],
        "seconds": round(time.monotonic() - began, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="all", help="names, separated by commas")
    parser.add_argument("--world-sizes", default="2")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(variants.VARIANTS) if options.variants == "all" else options.variants.split(",")
    results = {}
    for world_size in map(int, options.world_sizes.split(",")):
        for name in names:
            results[f"{name}/{world_size}"] = run_job(name, world_size)
    options.out.write_text(json.dumps(results, indent=1))
    failed = [job for job, result in results.items() if any(result.get("exits", []))]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

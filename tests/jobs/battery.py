"""Runs many small healthy jobs, one after the other, on ranks forked from this process.

    python battery.py --variants plain,gan --world-sizes 2,3 --out results.json

`results.json` holds, for each job, a SHA-256 of the final state of every rank, errors and exit statuses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers
import torch.distributed.optim  # slow to import: once here instead of once in each rank
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import forking
import variants


def digest(thing: Any, sink: Any = None) -> str:
    """SHA-256 over everything in `thing`, to the bit: tensors with dtype, shape and bytes."""
    sink = hashlib.sha256() if sink is None else sink
    if isinstance(thing, nn.Module):
        # Not the state_dict alone: it leaves out buffers that are not persistent.
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


def rank_main(rank: int, name: str, world_size: int, results: Any) -> None:
    """One rank: everything as a user's script would do it."""
    torch.manual_seed(0)
    try:
        variants.make_group(rank, world_size)
        state = variants.VARIANTS[name](rank, world_size)
        forking.keep(state)
        results.put((rank, digest(state), ""))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, "", traceback.format_exc()))
        raise


def run_job(name: str, world_size: int, target: Any = rank_main) -> dict[str, Any]:
    if world_size < variants.LEAST_RANKS[name]:
        return {"skipped": f"needs {variants.LEAST_RANKS[name]} ranks"}
    results = multiprocessing.get_context("fork").SimpleQueue()
    began = time.monotonic()
    ended = forking.run_ranks(target, world_size, name, world_size, results)
    states, errors = [""] * world_size, [""] * world_size
    while not results.empty():
        rank, state, error = results.get()
        states[rank], errors[rank] = states[rank] or state, errors[rank] or error
    return {
        "ranks": states,
        "errors": errors,
        "pids": ended.pids,
        "exits": ended.exits,
        "late": ended.late,
        "seconds": round(time.monotonic() - began, 3),
    }


def import_compiler() -> None:
    """What torch.compile imports when it is first used."""
    for name in ("functorch.compile", "networkx", "torch._inductor.lowering"):
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="all", help="names, separated by commas")
    parser.add_argument("--world-sizes", default="2")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = list(variants.VARIANTS) if options.variants == "all" else options.variants.split(",")
    if any(name.startswith("compiled") for name in names):
        import_compiler()
    forking.prepare()
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

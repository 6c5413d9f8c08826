"""The job of `ddpcheck selftest`: a small DDP job that trains a block of steps whenever it is asked to.

    python job.py FOLDER --ranks 2 --blocks 6 --steps 32 --device cpu

Standard library and torch only, and no import of ddpcheck: it is watched like any other job. Without RANK in its
environment, it starts the ranks and waits for them. Rank 0 begins a block when FOLDER/go-N exists, and writes
FOLDER/block-N with the seconds that it took; at the end every rank writes FOLDER/weights-RANK.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.002
# A coordinator that has ended gives no more orders.
_MOST_SECONDS = 300.0
_WIDTH = {"cpu": 192}
_WIDTH_ON_DEVICE = 1024
_LAYERS = 6
_BATCH = 64


def start_ranks(options: argparse.Namespace) -> int:
    """One process per rank; the first status that is not 0."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
        # The same bits in every run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    statuses = [rank.wait() for rank in ranks]
    return next((1 if status < 0 else status for status in statuses if status), 0)


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    folder = Path(options.folder)
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if options.device != "cpu":
        device = torch.device(options.device, rank)
        getattr(torch, options.device).set_device(rank)
    dist.init_process_group("gloo" if options.device == "cpu" else None)
    torch.manual_seed(11)
    width = _WIDTH.get(options.device, _WIDTH_ON_DEVICE)
    body = [
        part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
    ]
    model = DistributedDataParallel(
        nn.Sequential(*body, nn.Linear(width, 10)).to(device),
        device_ids=None if device.type == "cpu" else [rank],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(_BATCH, width, generator=generator).to(device)
    labels = torch.randint(0, 10, (_BATCH,), generator=generator).to(device)
    loss_function = nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        loss = step()
    loss.item()
    if rank == 0:
        (folder / "ready").touch()
    for block in range(options.blocks):
        if rank == 0:
            _wait_for(folder / f"go-{block}")
        dist.barrier()
        began = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        # Waits for the device.
        loss.item()
        dist.barrier()
        if rank == 0:
            _write(folder / f"block-{block}", {"seconds": time.perf_counter() - began})
    weights = {name: _digest(tensor) for name, tensor in model.module.state_dict().items()}
    _write(folder / f"weights-{rank}.json", {"weights": weights, "loss": repr(loss.item())})
    dist.destroy_process_group()


def _digest(tensor: Any) -> str:
    import torch

    values = tensor.detach().cpu().contiguous().view(torch.uint8).reshape(-1)
    return hashlib.sha256(bytes(values.tolist())).hexdigest()


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + _MOST_SECONDS
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{path} did not appear within {_MOST_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _write(path: Path, document: dict[str, Any]) -> None:
    """Complete as soon as it exists."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document))
    part.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="The job of `ddpcheck selftest`.")
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return start_ranks(options)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One small job for each private name of torch, as if torch had renamed it: torch imported once, ranks forked.

    python missing_names.py FOLDER

Writes a run folder and the final weights for each case; the case "none" has all names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

# With gloo, torch can hang when it frees a reducer that holds the last reference to its process group: the destructor
# holds the GIL and waits for a thread that needs it. The process ends without freeing it.
_KEPT: list[Any] = []


def train(folder: Path) -> str:
    """Everything that needs a private name on a processor; the digest of the final weights."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    _KEPT.append(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
    data = TensorDataset(torch.randn(30, 4, generator=torch.Generator().manual_seed(1)))
    for (batch,) in DataLoader(data, batch_size=6):
        optimizer.zero_grad()
        scaler.scale(ddp(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    weights = b"".join(bytes(p.detach().numpy().tobytes()) for p in ddp.parameters())
    dist.destroy_process_group()
    return hashlib.sha256(weights).hexdigest()


def case(folder: Path, index: int | None) -> None:
    from ddpcheck import torch_compat

    if index is not None:
        torch_compat.TABLE[index].name += "_renamed"
    torch_compat.bind()
    os.environ["DDPCHECK_CONFIG"] = json.dumps({"run_dir": str(folder), "run_id": "test", "hang_timeout": 0})
    from ddpcheck.agent.install import install

    install()
    (folder / "weights").write_text(train(folder))


def warm_up() -> None:
    """Import before the forks what every case needs, except for the agent, which binds names at import."""
    import ddpcheck.probes.registry  # noqa: F401

    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()


def main(root: Path) -> None:
    from ddpcheck.torch_compat import TABLE

    torch.set_num_threads(1)
    warm_up()
    running: list[int] = []
    for index in (None, *range(len(TABLE))):
        folder = root / ("none" if index is None else str(index))
        folder.mkdir(parents=True)
        child = os.fork()
        if not child:
            try:
                case(folder, index)
            except BaseException:
                (folder / "error").write_text(traceback.format_exc())
            os._exit(0)
        running.append(child)
        if len(running) == 2:
            os.waitpid(running.pop(0), 0)
    for child in running:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

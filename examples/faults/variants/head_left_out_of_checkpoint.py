"""The optimizer also trains a head that was never saved: its momenta come back, its weights do not.

variant of: optimizer_made_after_its_load
seen in: -
ranks: 2
expect: DDP216
cause: in the optimizer, but not in the state dict
step: 0
outliers: 0 1
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
    head = nn.Linear(24, 4)
    return body, head, torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)


def saved_by_an_earlier_run(path):
    torch.manual_seed(23)
    body, head, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        head(body(torch.randn(8, 6))).square().mean().backward()
        optimizer.step()
    torch.save({"body": body.state_dict(), "optimizer": optimizer.state_dict()}, path)


def train():
    torch.manual_seed(24)
    body, head, optimizer = build()
    with tempfile.TemporaryDirectory() as folder:
        saved_by_an_earlier_run(os.path.join(folder, "last.pt"))
        checkpoint = torch.load(os.path.join(folder, "last.pt"), weights_only=True)
    body.load_state_dict(checkpoint["body"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    ddp = DDP(nn.Sequential(body, head))
    data = torch.Generator().manual_seed(34 + dist.get_rank())
    for _ in range(4):
        inputs, labels = torch.randn(8, 6, generator=data), torch.randint(4, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

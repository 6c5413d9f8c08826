"""Only rank 0 loads the checkpoint, and after wrapping: DDP does not broadcast it.

DDP copies rank 0's parameters to the others once, in its constructor. What rank 0 loads later stays there, and the
replicas start out different. Averaged gradients never bring them together again.

bug: 15
seen in: speculators#926
ranks: 3
expect: DDP208
cause: by rank 0 only
stage: rewritten
step: 0
outliers: 0
parameter: embed.weight
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(40, 12)
        self.score = nn.Linear(12, 3)

    def forward(self, words):
        return self.score(self.embed(words))


def saved_checkpoint():
    """Replaces the file of an earlier run."""
    torch.manual_seed(1)
    file = io.BytesIO()
    torch.save(Bag().state_dict(), file)
    file.seek(0)
    return file


def train():
    torch.manual_seed(47)
    ddp = DDP(Bag())
    if dist.get_rank() == 0:
        ddp.module.load_state_dict(torch.load(saved_checkpoint(), weights_only=True))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(150 + dist.get_rank())
    for _ in range(4):
        words = torch.randint(40, (6, 5), generator=data)
        labels = torch.randint(3, (6,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(words), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

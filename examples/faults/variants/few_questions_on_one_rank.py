"""Only answers are trained on, and the texts of one of three ranks hold few of them: each token there weighs more.

variant of: mean_over_own_tokens
seen in: transformers#34242
ranks: 3
expect: DDP305
cause: regardless of the number of labelled tokens
stage: forward
step: 0
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ANSWER = {0: 7, 1: 7, 2: 2}


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(24, 6)
        self.reads = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 24)

    def forward(self, batch):
        logits = self.out(self.reads(self.words(batch["input_ids"]))[0])
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])


def train():
    rank = dist.get_rank()
    torch.manual_seed(59)
    model = DDP(Answering(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        tokens = torch.randint(24, (3, 10), generator=data)
        labels = tokens.clone()
        labels[:, : -ANSWER[rank]] = -100
        optimizer.zero_grad()
        model({"input_ids": tokens, "labels": labels}).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A language model's loss, averaged over the tokens that each rank happens to have.

Texts differ in length and padding is left out of the loss. DDP then averages the ranks' means: a token on the
rank with short texts weighs several times one on the other.

bug: 35
seen in: transformers#34242
ranks: 2
expect: DDP305
cause: regardless of the number of labelled tokens
stage: forward
step: 1
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTHS = {0: [9, 10, 9, 8, 9], 1: [8, 3, 7, 5, 6]}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 32)

    def forward(self, input_ids, labels):
        logits = self.out(self.block(self.words(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def train():
    rank = dist.get_rank()
    torch.manual_seed(19)
    model = DDP(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(40 + rank)
    for length in LENGTHS[rank]:
        tokens = torch.randint(1, 32, (4, 10), generator=data)
        tokens[:, length:] = 0
        labels = torch.where(tokens == 0, -100, tokens)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

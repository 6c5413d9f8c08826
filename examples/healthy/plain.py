"""Training loops with nothing special about them, at every number of ranks up to four.

ranks: 1 2 3 4
expect: nothing
cases: perceptron convolutions transformer words
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
        )  # fmt: skip


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs).mean(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.reader = nn.Embedding(50, 12), nn.GRU(12, 10, batch_first=True)
        self.head = nn.Linear(10, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.reader(self.embedding(words))[1][0])


def build(case: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model, and the shape of one batch of its inputs."""
    if case == "perceptron":
        return nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)), (8, 20)
    if case == "convolutions":
        return Convolutions(), (8, 3, 8, 8)
    return (Transformer(), (6, 7, 16)) if case == "transformer" else (Words(), (6, 9))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    module, shape = build(case)
    model = DistributedDataParallel(module)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        if case == "convolutions"
        else torch.optim.AdamW(model.parameters(), lr=2e-3)
    )
    drawn = torch.Generator().manual_seed(1000 + dist.get_rank())
    for _ in range(6):
        inputs = (
            torch.randint(50, shape, generator=drawn)
            if case == "words"
            else torch.randn(shape, generator=drawn)
        )
        targets = torch.randint(5, shape[:1], generator=drawn)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

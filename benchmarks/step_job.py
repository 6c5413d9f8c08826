"""The job that step_time.py measures: two ranks that train a block of steps on request.

Not meant to be started by hand.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class SmallGpt(nn.Module):
    """About ten million parameters in 148 tensors."""

    def __init__(self, vocabulary: int = 2048, width: int = 256, blocks: int = 12, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 2048, (8, 129))  # 1,024 tokens predicted a step
    return SmallGpt(), tokens[:, :-1], tokens[:, 1:].reshape(-1)


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """As many parameters, next to no arithmetic: the worst case for anything that reads parameters."""
    width = 1826
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(4, width), torch.randint(0, width, (4,))


class ManySmall(nn.Module):
    """Two thousand parameters that hold next to nothing: what each costs however small it is."""

    def __init__(self, count: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(width, width)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.factors)).sum(0)


def many() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return ManySmall(), torch.randn(4, 16), torch.randint(0, 16, (4,))


MODELS = {"gpt": gpt, "mlp": mlp, "many": many}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    model, inputs, targets = MODELS[options.model]()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with open(f"{options.pipes}.in.{rank}") as orders, open(f"{options.pipes}.out.{rank}", "w") as answers:
        for order in orders:
            start, worked, faults = time.perf_counter(), time.process_time(), page_faults()
            for _ in range(int(order)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(inputs).flatten(0, -2), targets)
                loss.backward()
                optimizer.step()
            told = (time.perf_counter() - start, time.process_time() - worked, page_faults() - faults)
            print(*told, file=answers, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", required=True)
    parser.add_argument("--pipes", required=True)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch._dynamo  # noqa: F401  (once here instead of once in every rank)

    multiprocessing.start_processes(train, args=(options,), nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()

"""The job that step_time.py and cost_per_parameter.py measure: ranks that train a block of steps on request.

Not meant to be started by hand.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm."""

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
        self.blocks = nn.Sequential(*(TransformerBlock(width, 8) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class TinyParameters(nn.Module):
    """Parameters of 1 KB each: what a parameter costs however small it is."""

    def __init__(self, count: int, width: int = 16) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(width, width)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.factors)).sum(0)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """161 parameters with 25.6 million values, as in torchvision."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Training(NamedTuple):
    """A model, one batch, and the optimizer."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    optimizer: torch.optim.Optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def gpt(count: int) -> Training:
    tokens = torch.randint(0, 2048, (8, 129))  # 1,024 predicted tokens per step
    model = SmallGpt()
    return Training(model, tokens[:, :-1], tokens[:, 1:].reshape(-1), adamw(model))


def mlp(count: int) -> Training:
    """As many parameters, with very little arithmetic: the worst case for reading parameters."""
    width = 1826
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers)
    return Training(model, torch.randn(4, width), torch.randint(0, width, (4,)), adamw(model))


def tiny(count: int) -> Training:
    model = TinyParameters(count)
    return Training(model, torch.randn(4, 16), torch.randint(0, 16, (4,)), adamw(model))


def resnet(count: int) -> Training:
    model = ResNet50().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 96, 96).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Training(model, images, torch.randint(0, 1000, (2,)), optimizer)


def large(count: int) -> Training:
    """403 million parameters in bf16. SGD keeps no state: a rank holds weights, gradients and buckets."""
    width, layers = 4096, 24
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    inputs = torch.randn(8, width, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Training(model, inputs, torch.randint(0, width, (8,)), optimizer)


MODELS: dict[str, Callable[[int], Training]] = {
    "gpt": gpt,
    "mlp": mlp,
    "tiny": tiny,
    "resnet": resnet,
    "large": large,
}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    training = MODELS[options.model](options.parameters)
    ddp = DistributedDataParallel(training.model)
    with open(f"{options.pipes}.in.{rank}") as orders, open(f"{options.pipes}.out.{rank}", "w") as answers:
        for order in orders:
            start, processor, faults = time.perf_counter(), time.process_time(), page_faults()
            thread = time.thread_time()
            for _ in range(int(order)):
                training.optimizer.zero_grad()
                output = ddp(training.inputs).flatten(0, -2).float()
                nn.functional.cross_entropy(output, training.targets).backward()
                training.optimizer.step()
            measured = (
                time.perf_counter() - start,
                time.process_time() - processor,
                page_faults() - faults,
                time.thread_time() - thread,
            )
            print(*measured, file=answers, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument(
        "--parameters", type=int, default=2000, help="number of parameters of the model `tiny`"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", required=True)
    parser.add_argument("--pipes", required=True)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch._dynamo  # noqa: F401  (once here instead of once in every rank)

    multiprocessing.start_processes(train, args=(options,), nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()

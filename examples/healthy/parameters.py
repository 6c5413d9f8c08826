"""Parameters of every kind: shared, sparse, complex, empty, without dimensions, laid out in other ways.

ranks: 2 3
expect: nothing
cases: tied sparse sparse_adam complex scalar empty parameterless strided channels_last frozen ignored weight_norm
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=sparse)
        self.hidden, self.out = nn.Linear(6, 6), nn.Linear(6, 20, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.embedding(words)).tanh())


class Filter(nn.Module):
    """Weighs frequencies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.out = nn.Linear(10, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(inputs) * self.weights, n=10))


class Odd(nn.Module):
    """A linear layer with one more parameter of an unusual shape."""

    def __init__(self, extra: torch.Tensor | None) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(10, 4), nn.Sequential(nn.Identity(), nn.Flatten())
        self.extra = None if extra is None else nn.Parameter(extra)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.nothing(self.linear(inputs))
        if self.extra is None:
            return outputs
        return (
            outputs @ self.extra if self.extra.dim() == 2 and len(self.extra) else outputs * self.extra.sum()
        )


def build(case: str) -> nn.Module:
    if case in ("tied", "sparse", "sparse_adam"):
        return Tied(sparse=case.startswith("sparse"), tied=case == "tied")
    if case == "complex":
        return Filter()
    if case == "channels_last":
        network = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3))
        return network.to(memory_format=torch.channels_last)
    if case in ("frozen", "ignored", "weight_norm"):
        first = nn.Linear(10, 8)
        network = nn.Sequential(
            nn.utils.parametrizations.weight_norm(first) if case == "weight_norm" else first, nn.Linear(8, 4)
        )
        if case == "frozen":
            first.requires_grad_(False)
        if case == "ignored":
            # Left to every rank by itself, as the job says itself.
            nn.init.normal_(network[1].bias, std=1.0 + dist.get_rank())
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["1.bias"])
        return network
    extras = {"scalar": torch.tensor(1.5), "strided": torch.randn(6, 8)[::2, ::2].t()}
    return Odd({**extras, "empty": torch.zeros(0, 4)}.get(case))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    model = DistributedDataParallel(build(case))
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(wanted, lr=0.05)]
    if case == "sparse_adam":
        sparse = model.module.embedding.weight
        optimizers = [
            torch.optim.SparseAdam([sparse], lr=0.01),
            torch.optim.Adam([parameter for parameter in wanted if parameter is not sparse], lr=0.01),
        ]
    drawn = torch.Generator().manual_seed(88 + dist.get_rank())
    for _ in range(5):
        if case in ("tied", "sparse", "sparse_adam"):
            inputs = torch.randint(20, (12,), generator=drawn)
        elif case == "channels_last":
            inputs = torch.randn(4, 2, 8, 8, generator=drawn).to(memory_format=torch.channels_last)
        else:
            inputs = torch.randn(7, 10, generator=drawn)
        model.zero_grad()
        outputs = model(inputs)
        # An empty sum gives a loss of zero, and gradients all the same.
        (outputs.abs().square().mean() + outputs.sum() * 0.01).backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

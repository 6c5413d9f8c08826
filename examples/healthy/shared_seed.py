"""Random numbers that all ranks draw alike, rightly: noise on reduced gradients or parameters, choices for a log.

ranks: 2 3
expect: nothing
cases: gradient_noise logged_samples private_gradients perturbed_parameters reset_units drawn_schedule layer_drop
    stochastic_rounding
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


class Deep(nn.Module):
    """All ranks skip the same layers, so that every rank has the same set of used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 1)

    def forward(self, inputs: torch.Tensor, skipped: set[int]) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            # The layer takes part with weight zero, so that it has a gradient.
            inputs = inputs + (0.0 if index in skipped else 1.0) * layer(inputs).tanh()
        return self.head(inputs)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # One seed for all ranks, and never another one.
    torch.manual_seed(8)
    model = DistributedDataParallel(Deep())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = torch.Generator().manual_seed(30 + dist.get_rank())
    for step in range(STEPS):
        skipped: set[int] = set()
        if case == "layer_drop":
            skipped = {index for index in range(4) if torch.rand(()) < 0.3}
        batch = torch.randn(8, 12, generator=own)
        optimizer.zero_grad()
        outputs = model(batch, skipped)
        loss = outputs.square().mean()
        loss.backward()
        if case == "gradient_noise":
            # Annealed noise on the reduced gradients: the same on every rank, or replicas would diverge.
            for parameter in model.parameters():
                parameter.grad.add_(torch.randn_like(parameter), alpha=0.01 / (1 + step) ** 0.55)
        elif case == "private_gradients":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                noise = torch.normal(0.0, 0.02, parameter.shape)
                parameter.grad += noise
            assert math.isfinite(norm)
        elif case == "logged_samples":
            chosen = torch.randint(8, (2,))
            print([round(value, 3) for value in outputs.detach()[chosen, 0].tolist()])
        elif case == "drawn_schedule":
            optimizer.param_groups[0]["lr"] = 0.02 + 0.05 * torch.rand(()).item()
        optimizer.step()
        with torch.no_grad():
            if case == "perturbed_parameters":
                for parameter in model.parameters():
                    parameter.add_(1e-3 * torch.randn_like(parameter))
            elif case == "reset_units" and step % 3 == 2:
                # Units that are hardly used start again, on all ranks alike.
                unit = int(torch.randint(12, ()))
                model.module.layers[0].weight[unit] = torch.randn(12) / 12**0.5
            elif case == "stochastic_rounding":
                for parameter in model.parameters():
                    low = parameter.to(torch.bfloat16).float()
                    parameter.copy_(torch.where(torch.rand_like(parameter) < 0.5, low, parameter))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Jobs that begin from a file: continued, fine-tuned, converted, averaged, restarted on purpose.

ranks: 2
expect: nothing
cases: continued pretrained_backbone prefix_removed averaged_aside converted_layout half_precision_copy fine_tuned
  warm_restart perturbed evaluated_before layers_taken_over from_half_precision adapters loaded_on_rank_0
  another_optimizer
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.stem(images)).flatten(1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class WithAdapter(nn.Module):
    """A frozen model and a small trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Net().requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(images))


def earlier_run(path: str, module: nn.Module, wrapped: bool = False) -> None:
    """What a first run has saved."""
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.randn(4, 3, 4, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
    weights = {f"module.{name}" if wrapped else name: value for name, value in module.state_dict().items()}
    torch.save(
        {
            "model": weights,
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "epoch": 3,
        },
        path,
    )


def loaded(path: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def prepare(case: str, path: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(40)
    earlier_run(path, WithAdapter() if case == "adapters" else Net(), wrapped=case == "prefix_removed")
    if case == "adapters":
        whole = loaded(path)
        part = {name: value for name, value in whole["model"].items() if name.startswith("adapter.")}
        torch.save({"adapter": part, "optimizer": whole["optimizer"]}, path)
    torch.manual_seed(41)
    checkpoint = loaded(path)
    weights: dict[str, Any] = checkpoint.get("model", {})
    if case == "adapters":
        model: nn.Module = WithAdapter()
        model.load_state_dict(checkpoint["adapter"], strict=False)
    elif case == "pretrained_backbone":
        model = Net(classes=7)
        weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
        model.load_state_dict(weights, strict=False)
    elif case == "prefix_removed":
        model = Net()
        model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    elif case == "averaged_aside":
        model, average = Net(), Net()
        average.load_state_dict(weights)
    elif case == "layers_taken_over":
        # A new layer begins as a copy of its neighbour.
        model = Net()
        again = {
            name.replace("layers.1.", "layers.2."): value for name, value in weights.items() if ".1." in name
        }
        model.load_state_dict({**weights, **again})
    elif case == "from_half_precision":
        torch.save({name: value.bfloat16() for name, value in weights.items()}, path)
        model = Net()
        model.load_state_dict(loaded(path))
    elif case == "loaded_on_rank_0":
        model = Net()
        if dist.get_rank() == 0:
            model.load_state_dict(weights)
    else:
        model = Net()
        model.load_state_dict(weights)
    if case == "converted_layout":
        model = model.to(memory_format=torch.channels_last)
    if case == "half_precision_copy":
        copy = Net().bfloat16()
        copy.load_state_dict(weights)
        copy(torch.randn(2, 3, 4, 4).bfloat16())
    if case == "perturbed":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5).add_(0.01 * torch.randn(parameter.shape))
    if case == "evaluated_before":
        # The best weights so far, for a table; then those to continue from.
        best = Net()
        torch.save(best.state_dict(), path)
        model.load_state_dict(loaded(path))
        model.load_state_dict(weights)
    wrapped = DDP(model)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if case == "another_optimizer":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(trained, lr=0.001 if case == "fine_tuned" else 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if case in (
        "continued",
        "warm_restart",
        "prefix_removed",
        "adapters",
        "converted_layout",
        "evaluated_before",
    ):
        optimizer.load_state_dict(checkpoint["optimizer"])
    if case in ("continued", "prefix_removed", "another_optimizer"):
        schedule.load_state_dict(checkpoint.get("schedule", {}))
    return wrapped, optimizer, schedule


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, schedule = prepare(case, os.path.join(folder, "last.pt"))
    drawn = torch.Generator().manual_seed(80 + dist.get_rank())
    for _ in range(4):
        images, labels = torch.randn(6, 3, 4, 4, generator=drawn), torch.randint(4, (6,), generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

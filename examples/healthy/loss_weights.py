"""Losses that ranks weight differently for a reason, or alike, and batches that meet several ranks by design.

ranks: 2 3
expect: nothing
cases: weighted_by_tokens weighted_by_shares other_scales noisy_labels tasks_in_turn factor_from_schedule scaled_loss
  replayed_in_own_order exchanged_examples half_of_the_steps_masked smoothed_everywhere smoothing_by_schedule
  classes_weighted_by_batch classes_weighted_by_share smoothed_now_and_then
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 24


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.number = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(inputs).relu()
        return self.classes(hidden), self.number(hidden)


def loss_of(
    case: str, step: int, model: nn.Module, inputs: torch.Tensor, drawn: torch.Generator
) -> torch.Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    classes, number = model(inputs)
    labels = inputs[:, :4].argmax(1)
    both = F.cross_entropy(classes, labels) + 0.0 * number.sum()
    if case == "weighted_by_tokens":
        total = torch.tensor(float(len(inputs)))
        dist.all_reduce(total)
        summed = F.cross_entropy(classes, labels, reduction="sum")
        return summed * ranks / total.item() + 0.0 * number.sum()
    if case == "weighted_by_shares":
        # Rank 0 has twice as many samples as each of the others.
        return F.cross_entropy(torch.cat([classes, number], 1), labels) * (
            len(inputs) * ranks / (8 * (ranks + 1))
        )
    if case == "other_scales":
        return F.mse_loss(number, inputs[:, :1] * 4**rank) + 0.0 * classes.sum()
    if case == "noisy_labels" and rank == 1:
        return F.cross_entropy(classes, torch.randint(4, labels.shape, generator=drawn)) + 0.0 * number.sum()
    if case == "tasks_in_turn" and (rank + step) % 2:
        return F.mse_loss(number, inputs[:, :1]) * 0.5 + 0.0 * classes.sum()
    if case in ("smoothed_everywhere", "smoothing_by_schedule", "smoothed_now_and_then"):
        by_step = 0.1 if step < 12 else 0.0
        # A rank may smooth the labels of the batches that it does not trust.
        drawn_here = 0.1 * int(torch.randint(2, (), generator=drawn))
        smoothing = {"smoothing_by_schedule": by_step, "smoothed_now_and_then": drawn_here}.get(case, 0.1)
        return F.cross_entropy(classes, labels, label_smoothing=smoothing) + 0.0 * number.sum()
    if case == "classes_weighted_by_batch":
        counts = torch.bincount(labels, minlength=4).clamp(min=1)
        return F.cross_entropy(classes, labels, weight=len(labels) / (4.0 * counts)) + 0.0 * number.sum()
    if case == "classes_weighted_by_share":
        # Each rank has weights for its own share of the data.
        shares = torch.tensor([1.0, 2.0, 1.0, 0.5]).roll(rank)
        return F.cross_entropy(classes, labels, weight=shares) + 0.0 * number.sum()
    if case == "factor_from_schedule":
        return both * (1.0 / (1 + step))
    if case == "half_of_the_steps_masked" and (rank + step) % 2:
        return both * 0.0
    return both


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90)
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=case == "scaled_loss")
    drawn = torch.Generator().manual_seed(rank)
    everyone_s = torch.Generator().manual_seed(91)
    received = torch.randn(4, 8, generator=drawn)
    for step in range(STEPS):
        inputs = torch.randn(8, 8, generator=drawn)
        if case == "weighted_by_tokens":
            inputs = inputs[: int(torch.randint(3, 9, (), generator=drawn))]
        elif case == "weighted_by_shares" and rank == 0:
            inputs = torch.cat([inputs, torch.randn(8, 8, generator=drawn)])
        elif case == "replayed_in_own_order":
            if not step:
                rollout = torch.randn(STEPS, 8, 8, generator=everyone_s)
                order = torch.randperm(STEPS, generator=drawn).tolist()
            inputs = rollout[order[step]]
        elif case == "exchanged_examples":
            # Half of each batch is what the next rank found hard in the step before.
            fresh = torch.randn(4, 8, generator=drawn)
            inputs = torch.cat([fresh, received])
            parts = [torch.empty_like(fresh) for _ in range(ranks)]
            dist.all_gather(parts, fresh)
            received = parts[(rank + 1) % ranks]
        optimizer.zero_grad()
        scaler.scale(loss_of(case, step, model, inputs, drawn)).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ranks that are given the same tensor on purpose, and learn from something else: rollouts, users or targets.

ranks: 2 3
expect: nothing
cases: shared_prompts shared_candidates own_targets validation_with_gradients distilled_prompts own_rewards
    common_queries
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


class Towers(nn.Module):
    """Scores of users for items; either side may be encoded alone."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.items(items)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # The same on all ranks, and different on each.
    common = torch.Generator().manual_seed(4)
    own = torch.Generator().manual_seed(400 + rank)
    teacher = nn.Linear(12, 8)
    torch.manual_seed(700 + rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        if case == "validation_with_gradients":
            shared = torch.randn(10, 12, generator=own)
        else:
            shared = torch.randn(10, 12, generator=common)
        outputs = model(shared)
        if case == "shared_prompts":
            # Policy gradient: each rank samples answers of its own to the same prompts.
            chosen = torch.distributions.Categorical(logits=outputs)
            answers = chosen.sample()
            reward = (answers % 3 == 0).float() + 0.1 * torch.randn(10, generator=own)
            loss = -(chosen.log_prob(answers) * (reward - reward.mean())).mean()
        elif case == "own_rewards":
            # The sampled actions come from a generator of the job, not from torch's.
            probabilities = outputs.softmax(-1)
            actions = torch.multinomial(probabilities.detach(), 4, replacement=True, generator=own)
            advantage = torch.randn(10, 4, generator=own)
            loss = -(probabilities.log().gather(1, actions) * advantage).mean()
        elif case == "shared_candidates":
            # The same candidate items, and this rank's users.
            users = torch.randn(6, 8, generator=own)
            clicked = torch.randint(10, (6,), generator=own)
            loss = functional.cross_entropy(users @ outputs.T, clicked)
        elif case == "common_queries":
            # In-batch negatives of all ranks, and positives of this one.
            mine = torch.randn(10, 8, generator=own)
            loss = functional.cross_entropy(outputs @ mine.T, torch.arange(10))
        elif case == "own_targets":
            # One recording, annotated by different people.
            loss = functional.mse_loss(outputs, torch.randn(10, 8, generator=own))
        elif case == "distilled_prompts":
            noisy = shared + 0.1 * torch.randn(10, 12, generator=own)
            loss = functional.mse_loss(outputs, teacher(noisy).detach())
        else:
            loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        if case == "validation_with_gradients":
            # Without torch.no_grad(), as it happens.
            scores = [model(torch.randn(10, 12, generator=common)).square().mean().item() for _ in range(2)]
            if rank == 0 and step == STEPS - 1:
                print(sum(scores))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

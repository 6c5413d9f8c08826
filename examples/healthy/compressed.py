"""Communication hooks of the job's own that send less than the gradient, and add what they left out to the next one.

ranks: 2 3
expect: nothing
cases: top_k top_k_small random_k sign_with_feedback low_rank_by_hand quantised_with_feedback
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Compression:
    """The residual of each bucket: what was not sent yet."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.residuals: dict[int, torch.Tensor] = {}
        self.steps = 0

    def compress(self, flat: torch.Tensor) -> torch.Tensor:
        if self.case.startswith("top_k"):
            kept = max(1, flat.numel() // (8 if self.case.endswith("small") else 4))
            sent = torch.zeros_like(flat)
            indices = flat.abs().topk(kept).indices
            sent[indices] = flat[indices]
            return sent
        if self.case == "random_k":
            # All ranks choose the same coordinates.
            self.steps += 1
            chosen = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(self.steps))
            sent = torch.zeros_like(flat)
            indices = chosen[: flat.numel() // 3]
            sent[indices] = flat[indices]
            return sent
        if self.case == "sign_with_feedback":
            return flat.sign() * flat.abs().mean()
        if self.case == "low_rank_by_hand":
            side = int(flat.numel() ** 0.5)
            matrix = flat[: side * side].view(side, side)
            u, s, v = torch.linalg.svd(matrix)
            sent = flat.clone()
            sent[: side * side] = (u[:, :3] * s[:3] @ v[:3]).reshape(-1)
            return sent
        scale = flat.abs().max() / 3 + 1e-12
        return (flat / scale).round() * scale


def hook(state, bucket):
    residual = state.residuals.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))
    if residual.numel() != bucket.buffer().numel():
        # DDP has rebuilt its buckets.
        residual = torch.zeros_like(bucket.buffer())
    wanted = bucket.buffer() + residual
    sent = state.compress(wanted)
    state.residuals[bucket.index()] = wanted - sent
    work = dist.all_reduce(sent / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    model.register_comm_hook(Compression(case), hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    drawn = torch.Generator().manual_seed(90 + dist.get_rank())
    target = nn.Linear(16, 4)
    for _ in range(40):
        inputs = torch.randn(16, 16, generator=drawn)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target(inputs).detach()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Gradients are averaged by hand in one flat buffer. From step 3 on the weights of the norm are taken out of it.

A change of the training script fine-tunes the norm with its own helper, which is never called.

variant of: reduced_by_hand_one_forgotten
ranks: 3
expect: DDP202
cause: Encoder.norm.bias, Encoder.norm.weight left out of a reduction by hand
stage: applied
step: 3
outliers: 0 1 2
parameter: Encoder.norm.bias
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.falls = nn.Linear(24, 3)

    def forward(self, inputs):
        return self.falls(self.norm(self.rises(inputs)).tanh())


def average(gradients):
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(reduced)


def train():
    torch.manual_seed(61)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(410 + dist.get_rank())
    for step in range(7):
        inputs = torch.randn(12, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        reduced = [p for name, p in model.named_parameters() if step < 3 or "norm" not in name]
        average([parameter.grad for parameter in reduced])
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

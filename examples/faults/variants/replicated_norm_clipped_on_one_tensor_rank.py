"""Tensor parallelism: gradients are clipped on one tensor-parallel rank only, and the replicated norm diverges.

Linear layers are sharded, the LayerNorm is replicated on every rank. As in the training of BLOOM-176B, the loop over
the gradients to clip leaves out replicated parameters on all ranks but the first: there it was meant to count them once
for the norm. Loss and gradient norm look as usual.

variant of: clip_on_one_rank
seen in: DeepSpeed#1801
ranks: 2
expect: DDP205
also: DDP606
cause: gradients were written to between backward and step
stage: applied
step: 2
outliers: 0 1
parameter: falls.bias
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rises = nn.Linear(8, 16)
        self.falls = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs):
        return self.norm(self.falls(self.rises(inputs).relu()))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(model, most):
    first = dist.get_rank() == 0
    gradients = [
        local(parameter.grad)
        for parameter in model.parameters()
        # Counted once for the norm; the same list is clipped.
        if first or not all(isinstance(each, Replicate) for each in parameter.placements)
    ]
    total = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(total)
    scale = most / max(float(total.sqrt()), most)
    for gradient in gradients:
        gradient.mul_(scale)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    torch.manual_seed(31)
    block = Block()
    distribute_module(
        block.norm,
        mesh,
        lambda _, module, mesh: (
            module.register_parameter(
                "weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate()]))
            )
            or module.register_parameter(
                "bias", nn.Parameter(distribute_tensor(module.bias, mesh, [Replicate()]))
            )
        ),
        lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Replicate()]),),
        lambda module, outputs, mesh: outputs.to_local(),
    )
    model = parallelize_module(block, mesh, {"rises": ColwiseParallel(), "falls": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(300)
    for step in range(6):
        inputs = torch.randn(4, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), (3 if step < 2 else 30) * inputs.cos()).backward()
        clip(model, 4.0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

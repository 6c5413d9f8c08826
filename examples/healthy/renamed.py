"""Parameters that get another name or another place in the model after wrapping: DDP keeps reducing the same tensors.

ranks: 2 3
expect: nothing
cases: submodule_renamed pruned pruned_midway pruned_and_removed renamed_in_accumulation half_frozen
    bucket_views bucket_views_in_accumulation own_hook half_frozen_views
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune


class Classifier(nn.Module):
    """A body and two heads, of which the second is renamed, moved or pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU())
        self.head = nn.Linear(16, 6)
        self.offset = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.body(inputs)
        heads = [module for name, module in self.named_children() if name != "body"]
        return sum(head(features) for head in heads)


def mean(state, bucket):
    flat = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def rename(network: Classifier) -> None:
    """As code that prepares a model for export does: the module is the same, its name and place are not."""
    head = network.head
    del network.head
    network.classifier = head


def change(network: Classifier, case: str) -> None:
    if not case.startswith("pruned"):
        rename(network)
    else:
        for module in network.modules():
            if isinstance(module, nn.Linear):
                prune.l1_unstructured(module, "weight", amount=0.2)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    network = Classifier()
    if case.startswith("half_frozen"):
        network.body[0].requires_grad_(False)
    model = DistributedDataParallel(network, gradient_as_bucket_view="views" in case)
    if case == "own_hook":
        model.register_comm_hook(None, mean)
    if case == "pruned":
        change(network, case)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    drawn = torch.Generator().manual_seed(80 + dist.get_rank())
    for step in range(8):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(8, 12, generator=drawn)).square().mean().backward()
        model(torch.randn(8, 12, generator=drawn)).square().mean().backward()
        if step == 3 and case.endswith("in_accumulation"):
            change(network, case)
        optimizer.step()
        if step == 3 and case != "pruned" and not case.endswith("in_accumulation"):
            change(network, case)
        if step == 6 and case == "pruned_and_removed":
            # Makes the pruning permanent: the masked weight becomes the parameter, in the same tensor.
            for module in network.modules():
                if isinstance(module, nn.Linear):
                    prune.remove(module, "weight")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

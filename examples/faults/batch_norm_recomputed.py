"""BatchNorm's statistics recomputed after training, on each rank from its own share.

The last step of many recipes: run some batches through the model in training mode without gradients, to get
precise statistics. Nothing averages them, so every rank evaluates another model, and the checkpoint holds the
statistics of one share of the data.

bug: 26
seen in: fvcore#152
ranks: 2
expect: DDP210
cause: written after the last training step
stage: buffers.end
step: none
outliers: 0 1
parameter: 1.running_mean
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def images(rank, count):
    data = torch.Generator().manual_seed(20 + rank)
    return [torch.randn(6, 1, 6, 6, generator=data) + 0.1 * rank for _ in range(count)]


@torch.no_grad()
def recompute_statistics(net, batches):
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over all batches
    net.train()
    for batch in batches:
        net(batch)


def train():
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for batch in images(rank, 5):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    recompute_statistics(net, images(rank, 4))
    net.eval()
    with torch.no_grad():
        score = net(images(99, 1)[0]).mean()
    print(f"rank {rank}: score {score:.6f}")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

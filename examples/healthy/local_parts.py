"""Parts that each rank holds or trains for itself by design: shards of a head, experts, tables, personal layers.

ranks: 2
expect: nothing
cases: class_shards class_shards_own_seed experts_imported experts_functional embedding_tables parallel_layers
  federated_norms personal_head federated_new_optimizers one_shot_average evolution hooks_reduce
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_to_all_single
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 8
CLASSES = 6  # of each rank


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for left, right in pairwise(sizes):
        layers += [nn.Linear(left, right), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Job:
    """The rank, and random batches of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.data = torch.Generator().manual_seed(700 + self.rank)

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.data)

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor.data)
            tensor.data /= self.size


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def classify(network: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(network(inputs), inputs[:, :4].argmax(1))


class Gather(torch.autograd.Function):
    """The rows of all ranks. Each gradient is reduced to the rank that the rows come from."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def, override]
        dist.all_gather(list(rows), own)
        return rows

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[no-untyped-def, override]
        parts = [gradient.contiguous() for gradient in gradients]
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        return parts[dist.get_rank()], *[None for _ in parts]


class ShardedLoss(torch.autograd.Function):
    """Cross entropy over classes of which each rank has some."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        most = logits.amax(1, keepdim=True)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        powers = (logits - most).exp()
        total = powers.sum(1, keepdim=True)
        dist.all_reduce(total)
        shares = powers / total
        here = (labels >= 0).nonzero().squeeze(1)
        of_label = torch.zeros(len(labels))
        of_label[here] = shares[here, labels[here]]
        dist.all_reduce(of_label)
        shares[here, labels[here]] -= 1
        ctx.save_for_backward(shares / len(labels))
        return -of_label.clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def, override]
        (shares,) = ctx.saved_tensors
        return shares * gradient, None


class ClassShard(nn.Module):
    """The centres of this rank's classes, for face recognition with millions of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CLASSES, width).normal_(0, 0.01))
        self.first = dist.get_rank() * CLASSES

    def forward(self, own: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = torch.cat(Gather.apply(own, *[torch.zeros_like(own) for _ in range(dist.get_world_size())]))
        everyone = [torch.zeros_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, labels)
        mine = torch.cat(everyone) - self.first
        mine[(mine < 0) | (mine >= CLASSES)] = -1
        logits = functional.linear(functional.normalize(rows), functional.normalize(self.weight))
        loss: torch.Tensor = ShardedLoss.apply(16 * logits, mine)
        return loss


def class_shards(job: Job, own_seed: bool = False) -> None:
    model = DistributedDataParallel(mlp(8, 16, 12))
    if own_seed:
        torch.manual_seed(100 + job.rank)
    head = ClassShard(12)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        labels = torch.randint(0, CLASSES * job.size, (8,), generator=job.data)
        minimise(optimizer, head(model(job.batch(8, 8)), labels))


class Exchange(torch.autograd.Function):
    """Sends each part of the rows to another rank, by a collective that was imported by name."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        received = torch.empty_like(rows)
        all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        received = torch.empty_like(gradient)
        all_to_all_single(received, gradient.contiguous())
        return received


def functional_exchange(rows: torch.Tensor) -> torch.Tensor:
    return wait_tensor(all_to_all_single_autograd(rows, None, None, dist.group.WORLD))


def experts(job: Job, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One expert per rank, in the optimizer of the wrapped trunk."""
    trunk = DistributedDataParallel(mlp(8, 12))
    torch.manual_seed(200 + job.rank)
    expert = mlp(12, 16, 12)
    optimizer = torch.optim.AdamW([*trunk.parameters(), *expert.parameters()], lr=1e-2)
    for _ in range(STEPS):
        inputs = job.batch(8, 8)
        tokens = trunk(inputs)
        outputs = tokens + exchange(expert(exchange(tokens)))
        minimise(optimizer, functional.cross_entropy(outputs, inputs.argmax(1)))


def embedding_tables(job: Job) -> None:
    """A recommender: each rank has its tables and looks up the ids of all ranks; the upper part is wrapped."""
    table = nn.EmbeddingBag(20 + 5 * job.rank, 6)
    upper = DistributedDataParallel(mlp(6 * job.size + 4, 16, 1))
    dense = torch.optim.Adam(upper.parameters(), 1e-2)
    sparse = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(STEPS):
        same = torch.Generator().manual_seed(step)
        parts = all_gather(table(torch.randint(0, 20, (8 * job.size, 3), generator=same)))
        own = torch.cat([part[8 * job.rank : 8 * job.rank + 8] for part in parts], 1)
        outputs = upper(torch.cat([own, job.batch(8, 4)], 1))[:, 0]
        sparse.zero_grad()
        minimise(dense, functional.binary_cross_entropy_with_logits(outputs, (job.batch(8) > 0).float()))
        sparse.step()


class ToLayers(torch.autograd.Function):
    """In front of layers that are split over ranks: their gradients are added up."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        return inputs

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class FromLayers(torch.autograd.Function):
    """Behind them: their outputs are added up."""

    @staticmethod
    def forward(ctx, outputs: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        total = outputs.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        return gradient


def parallel_layers(job: Job) -> None:
    """Tensor parallelism by hand: the layer in front is equal on all ranks, the others are parts."""
    front = nn.Linear(8, 12)
    torch.manual_seed(50 + job.rank)
    column, row = nn.Linear(12, 16 // job.size), nn.Linear(16 // job.size, 4, bias=False)
    optimizer = torch.optim.AdamW([*front.parameters(), *column.parameters(), *row.parameters()], lr=1e-2)
    same = torch.Generator().manual_seed(3)

    def network(inputs: torch.Tensor) -> torch.Tensor:
        hidden = ToLayers.apply(front(inputs).relu())
        outputs: torch.Tensor = FromLayers.apply(row(column(hidden).relu()))
        return outputs

    for _ in range(STEPS):
        minimise(optimizer, classify(network, torch.randn(8, 8, generator=same)))


def federated_norms(job: Job) -> None:
    """Federated averaging without the BatchNorm layers, which stay with each client."""
    network = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(STEPS):
        minimise(optimizer, classify(network, job.batch(16, 8)))
        if step % 3 == 2:
            job.average(p for name, p in network.named_parameters() if not name.startswith("1."))


def personal_head(job: Job) -> None:
    """Federated averaging of the body; each client keeps its head."""
    body, head = mlp(8, 16, 12), nn.Linear(12, 4)
    network = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(STEPS):
        minimise(optimizer, classify(network, job.batch(16, 8)))
        if step % 3 == 2:
            job.average(body.parameters())


def sampled() -> tuple[DistributedSampler[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(inputs)
    sampler = DistributedSampler(dataset)
    return sampler, DataLoader(dataset, batch_size=8, sampler=sampler)


def federated_new_optimizers(job: Job) -> None:
    """A sampler splits the data, and every round begins with the average and a new optimizer."""
    network = mlp(8, 16, 4)
    sampler, loader = sampled()
    for epoch in range(3):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            minimise(optimizer, classify(network, inputs))
        job.average(network.parameters())


def one_shot_average(job: Job) -> None:
    """Each rank trains to the end on its part of the data, then the models are averaged once."""
    network = mlp(8, 16, 4)
    sampler, loader = sampled()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            minimise(optimizer, classify(network, inputs))
    job.average(network.parameters())


def evolution(job: Job) -> None:
    """Each rank tries a perturbation of its own; all know each other's scores and make the same step."""
    network = mlp(8, 16, 4)
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for step in range(STEPS):
        seeds = [torch.Generator().manual_seed(1000 * step + rank) for rank in range(job.size)]
        noises = [[torch.randn(p.shape, generator=seed) for p in parameters] for seed in seeds]
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, noise in zip(parameters, noises[job.rank], strict=True):
                parameter.add_(0.1 * noise)
            score = -classify(network, job.batch(16, 8))
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        scores = [torch.zeros(()) for _ in range(job.size)]
        dist.all_gather(scores, score)
        for index, parameter in enumerate(parameters):
            terms = [-score * noise[index] for score, noise in zip(scores, noises, strict=True)]
            parameter.grad = torch.stack(terms).mean(0)
        optimizer.step()


def hooks_reduce(job: Job) -> None:
    """Hooks start an asynchronous AllReduce of each gradient; the loop waits for all of them before the step."""
    torch.manual_seed(1 + job.rank)
    network = mlp(8, 16, 16, 4)
    for parameter in network.parameters():
        dist.broadcast(parameter.data, 0)
    works = []

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(job.size)
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        classify(network, job.batch(8, 8)).backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(24)
    job = Job()
    if case.startswith("class_shards"):
        class_shards(job, own_seed=case == "class_shards_own_seed")
    elif case.startswith("experts"):
        experts(job, Exchange.apply if case == "experts_imported" else functional_exchange)
    else:
        globals()[case](job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ways to train in parallel that the job programs itself: outer steps, votes, delayed sums, flat parts, own batches.

ranks: 2
expect: nothing
cases: outer_optimizer predivided reduced_and_sent gathered_mean half_precision_sums sign_votes delayed flat_parts
    half_precision_copies bilevel four_models cached_gradients perturbed_batches perturbed_from_noise
    ignored_reduced_by_hand ignored_personal
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Job:
    """The rank, and random batches of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.own = torch.Generator().manual_seed(900 + self.rank)

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.own)

    def loss(self, model: nn.Module) -> torch.Tensor:
        inputs = self.batch(8, 8)
        return functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor.div_(self.size)


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def outer_optimizer(job: Job) -> None:
    """Steps of each rank by itself; how far all went, on average, is the gradient of an outer optimizer (DiLoCo)."""
    model = mlp(8, 16, 4)
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    shared = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        minimise(inner, job.loss(model))
        if step % 4 < 3:
            continue
        for start, parameter in zip(shared, model.parameters(), strict=True):
            start.grad = job.mean(start.detach() - parameter.detach())
        outer.step()
        for start, parameter in zip(shared, model.parameters(), strict=True):
            parameter.data.copy_(start.data)


def by_hand(job: Job, reduce: Callable[[nn.Module], None]) -> None:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        job.loss(model).backward()
        reduce(model)
        optimizer.step()


def predivided(job: Job) -> None:
    """Divided by the root of the number of ranks before the sum and after it."""

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad /= job.size**0.5
            dist.all_reduce(parameter.grad)
            parameter.grad /= job.size**0.5

    by_hand(job, reduce)


def reduced_and_sent(job: Job) -> None:
    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0)
            parameter.grad /= job.size
            dist.broadcast(parameter.grad, 0)

    by_hand(job, reduce)


def gathered_mean(job: Job) -> None:
    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            everyone = [torch.empty_like(parameter.grad) for _ in range(job.size)]
            dist.all_gather(everyone, parameter.grad)
            parameter.grad = torch.stack(everyone).mean(0)

    by_hand(job, reduce)


def half_precision_sums(job: Job) -> None:
    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = job.mean(parameter.grad.half()).float()

    by_hand(job, reduce)


def sign_votes(job: Job) -> None:
    """Ranks vote on the sign of each gradient."""

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            votes = parameter.grad.sign()
            dist.all_reduce(votes)
            parameter.grad = votes.sign()

    by_hand(job, reduce)


def delayed(job: Job) -> None:
    """Each step applies the mean of the step before, whose sum had a whole step to arrive."""
    arrived: list[torch.Tensor] = []

    def reduce(model: nn.Module) -> None:
        now = [job.mean(parameter.grad.clone()) for parameter in model.parameters()]
        before = arrived[:] or [torch.zeros_like(gradient) for gradient in now]
        arrived[:] = now
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient

    by_hand(job, reduce)


def flat_parts(job: Job) -> None:
    """Sharded optimizer state: each rank steps its part of one flat copy, and all parts are gathered into the model."""
    model = mlp(8, 16, 4)
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    share = -(-total // job.size)
    padding = share * job.size - total

    def own_part(tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = functional.pad(torch.cat([tensor.reshape(-1) for tensor in tensors]), (0, padding))
        return flat[job.rank * share : (job.rank + 1) * share].clone()

    part = nn.Parameter(own_part([parameter.detach() for parameter in parameters]))
    optimizer = torch.optim.AdamW([part], 1e-2)
    for _ in range(STEPS):
        model.zero_grad()
        job.loss(model).backward()
        part.grad = own_part([job.mean(parameter.grad) for parameter in parameters])
        optimizer.step()
        parts = [torch.empty(share) for _ in range(job.size)]
        dist.all_gather(parts, part.detach())
        nn.utils.vector_to_parameters(torch.cat(parts)[:total], parameters)


def half_precision_copies(job: Job) -> None:
    """The model is in bfloat16; the optimizer steps copies in float32, which are rounded into it."""
    model = mlp(8, 16, 4).bfloat16()
    copies = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for _ in range(STEPS):
        model.zero_grad()
        model(job.batch(8, 8).bfloat16()).square().mean().backward()
        for full, parameter in zip(copies, model.parameters(), strict=True):
            full.grad = job.mean(parameter.grad.float())
        optimizer.step()
        for full, parameter in zip(copies, model.parameters(), strict=True):
            parameter.data.copy_(full.data)


def bilevel(job: Job) -> None:
    """Weights of the losses are trained on other batches, by a gradient that is reduced by hand."""
    model, weights = DistributedDataParallel(mlp(8, 16, 3)), nn.Parameter(torch.zeros(3))
    trains, weighs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam([weights], 1e-2)
    for _ in range(STEPS):
        inputs = job.batch(8, 8)
        losses = (model(inputs) - inputs[:, :3]).square().mean(0)
        minimise(trains, (losses * weights.softmax(0).detach()).sum())
        later = model.module(job.batch(8, 8)).square().mean(0).detach()
        (slope,) = torch.autograd.grad((later * weights.softmax(0)).sum(), weights)
        weights.grad = job.mean(slope)
        weighs.step()


def four_models(job: Job) -> None:
    """Policy and critic are trained in one backward; the reference and the reward model are frozen."""
    policy, critic = DistributedDataParallel(mlp(6, 16, 5)), DistributedDataParallel(mlp(6, 16, 1))
    reference = copy.deepcopy(policy.module).eval().requires_grad_(False)
    reward_model = mlp(6, 8, 1).eval().requires_grad_(False)
    torch.manual_seed(100 + job.rank)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (policy, critic)]
    for _ in range(4):
        prompts = job.batch(8, 6)
        with torch.no_grad():
            answers = torch.distributions.Categorical(logits=policy.module(prompts)).sample()[:, None]
            before = policy.module(prompts).log_softmax(1).gather(1, answers)[:, 0]
            change = before - reference(prompts).log_softmax(1).gather(1, answers)[:, 0]
            rewards = reward_model(prompts)[:, 0] * (answers[:, 0].float() - 2) - 0.1 * change
        for _ in range(2):
            values = critic(prompts)[:, 0]
            advantage = (rewards - values).detach()
            ratio = (policy(prompts).log_softmax(1).gather(1, answers)[:, 0] - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            ((values - rewards).square().mean() - gain).backward()
            for optimizer in optimizers:
                optimizer.step()


def cached_gradients(job: Job) -> None:
    """A contrastive loss over more samples than fit: gradients of the embeddings first, then backwards in chunks."""
    model = DistributedDataParallel(mlp(8, 16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        chunks = job.batch(4, 4, 8)
        optimizer.zero_grad()
        with torch.no_grad():
            embeddings = torch.cat([model.module(chunk) for chunk in chunks])
        embeddings.requires_grad_()
        everyone = [torch.empty_like(embeddings) for _ in range(job.size)]
        dist.all_gather(everyone, embeddings.detach())
        everyone[job.rank] = embeddings
        labels = torch.arange(16) + 16 * job.rank
        functional.cross_entropy(embeddings @ torch.cat(everyone).T, labels).backward()
        cached = embeddings.grad.split(4)
        for chunk, slope in zip(chunks[:-1], cached, strict=False):
            with model.no_sync():
                (model(chunk) * slope).sum().backward()
        (model(chunks[-1]) * cached[-1]).sum().backward()
        optimizer.step()


def perturbed(job: Job, start: float) -> None:
    """Adversarial training: a perturbation of each batch is a parameter of an optimizer that lives as long."""
    model = DistributedDataParallel(mlp(8, 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        inputs = job.batch(8, 8)
        labels = inputs[:, :4].argmax(1)
        change = nn.Parameter(start * job.batch(8, 8))
        worsens = torch.optim.SGD([change], lr=0.05, maximize=True)
        for _ in range(2):
            minimise(worsens, functional.cross_entropy(model.module(inputs + change), labels))
            change.data.clamp_(-0.1, 0.1)
        minimise(optimizer, functional.cross_entropy(model(inputs + change.detach()), labels))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.own = mlp(8, 16, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(self.body(inputs))


def ignored(job: Job, personal: bool) -> None:
    """DDP ignores a layer: its gradients are reduced by hand, or each rank has its own."""
    network = Adapted()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["own.weight", "own.bias"])
    if personal:
        torch.manual_seed(50 + job.rank)
        network.own.reset_parameters()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        job.loss(model).backward()
        for parameter in () if personal else network.own.parameters():
            job.mean(parameter.grad)
        optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job()
    if case.startswith("perturbed"):
        perturbed(job, start=0.02 * (case == "perturbed_from_noise"))
    elif case.startswith("ignored"):
        ignored(job, personal=case == "ignored_personal")
    else:
        globals()[case](job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

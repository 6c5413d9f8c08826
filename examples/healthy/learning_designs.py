"""Designs of papers and public repositories: reinforcement learning, meta-learning, teachers, adversaries, privacy.

ranks: 2
expect: nothing
cases: ppo grpo dpo self_play maml reptile mean_teacher byol dino distillation gan_penalty wgan_clipped
    private_sgd pcgrad contrastive retrieval moco barlow label_propagation hypernetwork
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Job:
    """The seeds, and random batches of this rank."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.own = torch.Generator().manual_seed(1000 + self.rank)
        self.common = torch.Generator().manual_seed(77)

    def wrap(self, network: nn.Module, **options: object) -> DistributedDataParallel:
        model = DistributedDataParallel(network, **options)
        # From here on, every rank draws for itself.
        torch.manual_seed(2000 + self.rank)
        return model

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.own)

    def classes(self, count: int, size: int) -> torch.Tensor:
        return torch.randint(count, (size,), generator=self.own)


def gather_with_grad(own: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks; this rank's keeps its graph."""
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own.detach())
    everybody[dist.get_rank()] = own
    return torch.cat(everybody)


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, rate: float = 0.1) -> None:
    for slow, fast in zip(average.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, rate)


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(states).tanh()
        return self.actor(features), self.critic(features).squeeze(-1)


def ppo(job: Job) -> None:
    """Rollouts without gradients through the module itself, then several epochs over them."""
    model = job.wrap(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(2):
        states = job.batch(32, 8)
        with torch.no_grad():
            logits, values = model.module(states)
            policy = torch.distributions.Categorical(logits=logits)
            actions = policy.sample()
            before = policy.log_prob(actions)
        returns = states[:, 0] + (actions == 1).float()
        for _ in range(3):
            chosen = torch.randperm(32)[:16]
            logits, values = model(states[chosen])
            policy = torch.distributions.Categorical(logits=logits)
            ratio = (policy.log_prob(actions[chosen]) - before[chosen]).exp()
            advantage = returns[chosen] - values.detach()
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = (
                -clipped.mean() + (values - returns[chosen]).square().mean() - 0.01 * policy.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def grpo(job: Job) -> None:
    """All ranks answer the same prompts; each samples its own group of answers, scored relative to their mean."""
    model = job.wrap(mlp(8, 24, 6))
    reference = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        prompts = torch.randn(5, 8, generator=job.common)
        with torch.no_grad():
            answers = torch.distributions.Categorical(logits=model.module(prompts)).sample((4,))
        rewards = (answers % 2).float() + 0.1 * torch.randn(4, 5, generator=job.own)
        advantage = (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-4)
        log_probs = model(prompts).log_softmax(-1)
        chosen = log_probs.expand(4, -1, -1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
        divergence = functional.kl_div(
            reference(prompts).log_softmax(-1), log_probs, log_target=True, reduction="batchmean"
        )
        minimise(optimizer, -(advantage * chosen).mean() + 0.04 * divergence)


def dpo(job: Job) -> None:
    """Chosen and rejected answers in one forward; a frozen reference."""
    model = job.wrap(mlp(8, 16, 1))
    reference = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        pairs = job.batch(16, 8)
        gain = (model(pairs) - reference(pairs)).squeeze(-1)
        minimise(optimizer, -functional.logsigmoid(0.1 * (gain[:8] - gain[8:])).mean())


def self_play(job: Job) -> None:
    """A frozen copy of the policy is the opponent, and replaced by the latest weights now and then."""
    model = job.wrap(ActorCritic())
    opponent = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    replay: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        states = job.batch(12, 8)
        with torch.no_grad():
            mine = torch.distributions.Categorical(logits=model.module(states)[0]).sample()
            theirs = torch.distributions.Categorical(logits=opponent(states)[0]).sample()
        replay.append((states, (mine > theirs).float() - (mine < theirs).float()))
        states, outcome = replay[int(torch.randint(len(replay), ()))]
        logits, values = model(states)
        minimise(optimizer, (values - outcome).square().mean() + logits.logsumexp(-1).mean() * 0.01)
        if step % 3 == 2:
            opponent.load_state_dict(model.module.state_dict())


def maml(job: Job) -> None:
    """Inner steps on this rank's tasks with functional weights; the outer gradient goes through the wrapper."""

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner = mlp(4, 16, 1)

        def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
            weights = dict(self.learner.named_parameters())
            for _ in range(2):
                loss = (
                    (functional_call(self.learner, weights, (support,)) - support.sum(-1, True))
                    .square()
                    .mean()
                )
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: w - 0.05 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
            return (functional_call(self.learner, weights, (query,)) - query.sum(-1, True)).square().mean()

    model = job.wrap(Meta())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        minimise(optimizer, model(job.batch(8, 4), job.batch(8, 4)))


def reptile(job: Job) -> None:
    """A copy is trained on this rank's task; the way it went is the gradient, averaged over ranks by hand."""
    model = job.wrap(mlp(4, 16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        learner = copy.deepcopy(model.module)
        inner = torch.optim.SGD(learner.parameters(), lr=0.05)
        for _ in range(3):
            minimise(inner, learner(job.batch(8, 4)).square().mean())
        for parameter, moved in zip(model.module.parameters(), learner.parameters(), strict=True):
            parameter.grad = (parameter - moved).detach() / job.size
            dist.all_reduce(parameter.grad)
        optimizer.step()


def mean_teacher(job: Job) -> None:
    model = job.wrap(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    )
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = job.batch(12, 8)
        outputs, wanted = model(inputs + 0.1 * torch.randn_like(inputs)), teacher(inputs)
        minimise(optimizer, (outputs.softmax(-1) - wanted.softmax(-1)).square().mean())
        follow(teacher, model.module)


def byol(job: Job) -> None:
    """Two views through the wrapper in one forward, targets from a slow copy without its predictor."""
    online = nn.ModuleDict({"encoder": mlp(8, 16, 8), "predictor": mlp(8, 8, 8)})

    class Online(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = online

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
            return [self.parts["predictor"](self.parts["encoder"](view)) for view in (one, other)]

    model = job.wrap(Online())
    target = copy.deepcopy(online["encoder"]).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = job.batch(12, 8)
        one, other = (inputs + 0.2 * torch.randn_like(inputs) for _ in range(2))
        first, second = model(one, other)
        loss = -functional.cosine_similarity(first, target(other)).mean()
        minimise(optimizer, loss - functional.cosine_similarity(second, target(one)).mean())
        follow(target, online["encoder"])


def dino(job: Job) -> None:
    """Centring: the mean of the teacher's outputs over all ranks, kept outside the module."""
    model = job.wrap(mlp(8, 16, 6))
    teacher, centre = copy.deepcopy(model.module).requires_grad_(False), torch.zeros(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        inputs = job.batch(12, 8)
        wanted = teacher(inputs)
        sharpened = ((wanted - centre) / 0.04).softmax(-1)
        crops = model(inputs + 0.2 * torch.randn_like(inputs))
        minimise(optimizer, -(sharpened * (crops / 0.1).log_softmax(-1)).sum(-1).mean())
        mean = wanted.mean(0)
        dist.all_reduce(mean)
        centre = 0.9 * centre + 0.1 * mean / job.size
        follow(teacher, model.module, 0.05)


def distillation(job: Job) -> None:
    torch.manual_seed(50)
    teacher = mlp(8, 32, 5).requires_grad_(False).eval()
    model = job.wrap(mlp(8, 12, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs = job.batch(16, 8)
        soft = functional.kl_div(
            (model(inputs) / 2).log_softmax(-1), (teacher(inputs) / 2).softmax(-1), reduction="batchmean"
        )
        minimise(optimizer, 4 * soft)


def adversarial(job: Job, clipped: bool) -> None:
    """Two modules, two optimizers, several critic steps for one of the generator."""
    generator, critic = job.wrap(mlp(4, 16, 6)), job.wrap(mlp(6, 16, 1))
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=2e-3)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=2e-3)
    for step in range(STEPS):
        real = job.batch(10, 6) + 1
        fake = generator(torch.randn(10, 4)).detach()
        loss = critic(torch.cat([fake, real]))
        loss = loss[:10].mean() - loss[10:].mean()
        if not clipped:
            mixed = (real + torch.rand(10, 1) * (fake - real)).requires_grad_()
            (slope,) = torch.autograd.grad(critic.module(mixed).sum(), mixed, create_graph=True)
            # Through the module itself: DDP reduces the sum of both at the one backward.
            loss = loss + 0.1 * (slope.norm(dim=-1) - 1).square().mean()
        minimise(of_critic, loss)
        if clipped:
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        if step % 2:
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            minimise(of_generator, -critic.module(generator(torch.randn(10, 4))).mean())
            for parameter in critic.parameters():
                parameter.requires_grad_(True)


def private_sgd(job: Job) -> None:
    """Per-sample gradients, clipped and summed on each rank; one noise for all, from a common generator."""
    model = job.wrap(mlp(6, 8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = job.batch(6, 6)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for sample in inputs:
            slopes = torch.autograd.grad(model.module(sample).square().sum(), list(model.module.parameters()))
            norm = torch.stack([s.norm() for s in slopes]).norm()
            for sum_, slope in zip(total, slopes, strict=True):
                sum_ += slope * (1.0 / norm).clamp(max=1.0)
        for parameter, sum_ in zip(model.parameters(), total, strict=True):
            dist.all_reduce(sum_)
            noise = torch.randn(parameter.shape, generator=job.common)
            parameter.grad = (sum_ + 0.5 * noise) / (len(inputs) * job.size)
        optimizer.step()


def pcgrad(job: Job) -> None:
    """Gradient surgery: each task's gradient is reduced by hand, then conflicting parts are projected out."""
    model = job.wrap(mlp(6, 12, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for _ in range(STEPS):
        outputs = model.module(job.batch(8, 6))
        tasks = []
        for task in range(2):
            loss = (outputs[:, task] - task).square().mean()
            slopes = torch.autograd.grad(loss, parameters, retain_graph=True)
            flat = torch.cat([slope.reshape(-1) for slope in slopes])
            dist.all_reduce(flat)
            tasks.append(flat / job.size)
        one, other = tasks
        if one @ other < 0:
            one, other = (a - (a @ b) / (b @ b) * b for a, b in ((one, other), (other, one)))
        parts = (one + other).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()


def contrastive(job: Job) -> None:
    """Negatives gathered from all ranks, the temperature is learnt with the model."""

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(8, 16, 6), mlp(5, 16, 6)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                functional.normalize(self.image(image)),
                functional.normalize(self.text(text)),
                self.scale.exp(),
            )

    model = job.wrap(Clip())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        image, text, scale = model(job.batch(6, 8), job.batch(6, 5))
        labels = torch.arange(6) + 6 * job.rank
        loss = functional.cross_entropy(scale * image @ gather_with_grad(text).T, labels)
        minimise(optimizer, loss + functional.cross_entropy(scale * text @ gather_with_grad(image).T, labels))


def retrieval(job: Job) -> None:
    """Queries of this rank; passages of which some are the same hard negatives on every rank."""
    model = job.wrap(mlp(8, 16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        hard = torch.randn(4, 8, generator=job.common)
        encoded = model(torch.cat([job.batch(5, 8), job.batch(5, 8), hard]))
        queries, passages = encoded[:5], gather_with_grad(encoded[5:])
        labels = torch.arange(5) + 9 * job.rank
        minimise(optimizer, functional.cross_entropy(queries @ passages.T, labels))


def moco(job: Job) -> None:
    """A queue of keys of all ranks, kept in a buffer that every rank fills alike."""

    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = mlp(8, 16, 6)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(24, 6)))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, inputs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                follow(self.key, self.query)
                encoded = functional.normalize(self.key(keys))
            queries = functional.normalize(self.query(inputs))
            positive = (queries * encoded).sum(-1, keepdim=True)
            logits = torch.cat([positive, queries @ self.queue.clone().T], dim=1)
            everybody = gather_with_grad(encoded)
            at = int(self.pointer)
            self.queue[at : at + len(everybody)] = everybody
            self.pointer[0] = (at + len(everybody)) % len(self.queue)
            return logits / 0.2

    model = job.wrap(Moco())
    optimizer = torch.optim.SGD(model.module.query.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = job.batch(4, 8)
        logits = model(inputs, inputs + 0.1 * torch.randn_like(inputs))
        minimise(optimizer, functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))


def barlow(job: Job) -> None:
    """The correlation over the whole batch: reduced with its gradient."""
    from torch.distributed.nn.functional import all_reduce

    model = job.wrap(mlp(8, 16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = job.batch(10, 8)
        views = model(torch.cat([inputs, inputs + 0.2 * torch.randn_like(inputs)]))
        correlation = all_reduce(views[:10].T @ views[10:]) / (10 * job.size)
        minimise(optimizer, (correlation - torch.eye(5)).square().sum())


def label_propagation(job: Job) -> None:
    """A graph that all ranks hold; each rank's loss is over its own nodes."""
    model = job.wrap(mlp(8, 16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    nodes = torch.randn(30, 8, generator=job.common)
    links = (torch.rand(30, 30, generator=job.common) < 0.2).float()
    links = links / links.sum(1, keepdim=True).clamp(min=1)
    labels, own = torch.randint(3, (30,), generator=job.common), torch.arange(job.rank, 30, job.size)
    for step in range(STEPS):
        scores = model(nodes + 0.01 * step)
        scores = 0.5 * scores + 0.5 * links @ scores
        minimise(optimizer, functional.cross_entropy(scores[own], labels[own]))


def hypernetwork(job: Job) -> None:
    """The wrapped model makes the weights of another one, which has no parameters of its own."""
    model = job.wrap(mlp(3, 16, 6 * 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        task, inputs = job.batch(3), job.batch(8, 6)
        weights = model(task).view(6, 2)
        minimise(optimizer, (inputs @ weights - inputs[:, :2]).square().mean())


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    others: dict[str, Callable[[Job], None]] = {
        "gan_penalty": lambda job: adversarial(job, clipped=False),
        "wgan_clipped": lambda job: adversarial(job, clipped=True),
    }
    others.get(case, globals().get(case))(Job())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Modules beside the wrapped model that are right as they are: equal on all ranks, or different on purpose.

ranks: 2 3
expect: nothing
cases: linear_probe local_critic exploration_noise local_actor experts ema_teacher frozen_teacher loss_weights_wrapped
  both_wrapped target_copied_later head_reduced_by_hand head_averaged_now_and_then probe_on_rank_zero
  validated_before_training
"""

from __future__ import annotations

import copy
import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def linear_probe(data: torch.Generator, ranks: tuple[int, ...]) -> None:
    """A probe on detached features, for the log: nothing that is shared depends on it."""
    model = DistributedDataParallel(network(8, 16, 4))
    trains = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = nn.Linear(4, 2)
    probes = torch.optim.SGD(probe.parameters(), lr=0.1) if dist.get_rank() in ranks else None
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=data)
        outputs = model(inputs)
        trains.zero_grad()
        functional.cross_entropy(outputs, inputs[:, :4].argmax(1)).backward()
        if probes is not None:
            probes.zero_grad()
            functional.cross_entropy(probe(outputs.detach()), (inputs[:, 0] > 0).long()).backward()
            probes.step()
        trains.step()


def local_critic(data: torch.Generator) -> None:
    """Each rank judges its own environment by a critic of its own, in a backward of its own."""
    actor, critic = DistributedDataParallel(network(6, 16, 3)), network(6, 16, 1)
    acts, judges = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    for _ in range(STEPS):
        states, rewards = torch.randn(8, 6, generator=data), torch.randn(8, generator=data)
        advantage = rewards - critic(states).squeeze(1)
        judges.zero_grad()
        advantage.square().mean().backward()
        judges.step()
        acts.zero_grad()
        (-actor(states).log_softmax(1)[:, 0] * advantage.detach()).mean().backward()
        acts.step()


class Noise(nn.Module):
    """Noise with a state and a strength of its own on every rank."""

    def __init__(self, actions: int, strength: float) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.full((actions,), strength), requires_grad=False)
        self.register_buffer("state", torch.zeros(actions))

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        self.state = 0.9 * self.state + self.strength * torch.randn(len(self.strength))
        return actions + self.state


def exploration_noise(data: torch.Generator) -> None:
    torch.manual_seed(100 + dist.get_rank())
    policy, noise = DistributedDataParallel(network(6, 16, 2)), Noise(2, 0.1 * (1 + dist.get_rank()))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        states = torch.randn(8, 6, generator=data)
        actions = noise(policy(states))
        optimizer.zero_grad()
        functional.mse_loss(actions, states[:, :2]).backward()
        optimizer.step()


def local_actor(data: torch.Generator) -> None:
    """Each rank acts with a copy of the policy that is disturbed anew for every episode."""
    policy = DistributedDataParallel(network(6, 16, 2))
    actor = copy.deepcopy(policy.module).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        for own, shared in zip(actor.parameters(), policy.module.parameters(), strict=True):
            own.copy_(shared.detach() + 0.05 * torch.randn(shared.shape, generator=data))
        states, episodes = torch.randn(8, 6, generator=data), []
        for state in states:
            episodes.append(torch.cat([state, actor(state)]))
        episode = torch.stack(episodes)
        optimizer.zero_grad()
        functional.mse_loss(policy(episode[:, :6]), episode[:, 6:]).backward()
        optimizer.step()


class Exchange(torch.autograd.Function):
    """Sends each part of the rows to another rank, and the gradients back."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        parts = [part.contiguous() for part in rows.chunk(dist.get_world_size())]
        return torch.cat(exchange(parts))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        return torch.cat(exchange([part.contiguous() for part in gradient.chunk(dist.get_world_size())]))


def exchange(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    received = torch.empty_like(torch.cat(parts))
    dist.all_to_all_single(received, torch.cat(parts))
    return list(received.chunk(len(parts)))


def experts(data: torch.Generator) -> None:
    """One expert per rank: tokens of all ranks travel to it and back, so each one is trained by all the data."""
    trunk = DistributedDataParallel(network(8, 12))
    torch.manual_seed(200 + dist.get_rank())
    expert = network(12, 16, 12)
    optimizer = torch.optim.AdamW([*trunk.parameters(), *expert.parameters()], lr=1e-2)
    for _ in range(STEPS):
        inputs = torch.randn(12, 8, generator=data)
        tokens = trunk(inputs)
        outputs = tokens + Exchange.apply(expert(Exchange.apply(tokens)))
        optimizer.zero_grad()
        functional.cross_entropy(outputs, inputs.argmax(1)).backward()
        optimizer.step()


def ema_teacher(data: torch.Generator) -> None:
    """A teacher outside the wrapper follows the student, which is equal everywhere: so it is too."""
    torch.manual_seed(300 + dist.get_rank())
    student = DistributedDataParallel(network(8, 16, 4))
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.mse_loss(student(inputs), teacher(inputs + 0.1) + inputs[:, :4]).backward()
        optimizer.step()
        for mean, new in zip(teacher.parameters(), student.module.parameters(), strict=True):
            mean.lerp_(new.detach(), 0.1)


def frozen_teacher(data: torch.Generator) -> None:
    teacher = network(8, 32, 4).eval().requires_grad_(False)
    trained = torch.Generator().manual_seed(5)
    teacher.load_state_dict(
        {name: torch.randn(value.shape, generator=trained) for name, value in teacher.state_dict().items()}
    )
    torch.manual_seed(400 + dist.get_rank())
    student = DistributedDataParallel(network(8, 8, 4))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.mse_loss(student(inputs), teacher(inputs)).backward()
        optimizer.step()


class Weighted(nn.Module):
    """A model with the learnable weights of its losses inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.log_variances = network(8, 16, 4), nn.Parameter(torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.model(inputs)
        losses = torch.stack([outputs.square().mean(), functional.mse_loss(outputs, inputs[:, :4])])
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


def loss_weights_wrapped(data: torch.Generator) -> None:
    model = DistributedDataParallel(Weighted())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 8, generator=data)).backward()
        optimizer.step()


def both_wrapped(data: torch.Generator) -> None:
    """A GAN with both halves wrapped, one optimizer each."""
    generator, critic = DistributedDataParallel(network(4, 16, 6)), DistributedDataParallel(network(6, 16, 1))
    makes, judges = (
        torch.optim.Adam(generator.parameters(), 1e-3),
        torch.optim.Adam(critic.parameters(), 1e-3),
    )
    for _ in range(STEPS):
        real, drawn = torch.randn(8, 6, generator=data) + 2, torch.randn(8, 4, generator=data)
        judges.zero_grad()
        scores = critic(torch.cat([real, generator(drawn).detach()]))
        (scores[8:].mean() - scores[:8].mean()).backward()
        judges.step()
        makes.zero_grad()
        critic.requires_grad_(False)
        (-critic.module(generator(drawn)).mean()).backward()
        critic.requires_grad_(True)
        makes.step()


def target_copied_later(data: torch.Generator) -> None:
    """The target begins as each rank's own network and is overwritten by the online one every third step."""
    torch.manual_seed(500 + dist.get_rank())
    online, target = DistributedDataParallel(network(4, 16, 2)), network(4, 16, 2).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for step in range(STEPS):
        states, after = torch.randn(2, 8, 4, generator=data)
        values = online(states)
        aims = torch.randn(8, generator=data) + 0.9 * target(after).amax(1)
        optimizer.zero_grad()
        functional.smooth_l1_loss(values.amax(1), aims).backward()
        optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(online.module.state_dict())


def head_by_hand(data: torch.Generator, averaged: bool) -> None:
    """A head that DDP does not hold: its gradients are reduced by hand, or its values are averaged now and then."""
    model, head = DistributedDataParallel(network(8, 12)), nn.Linear(12, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for step in range(STEPS + 1):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(head(model(inputs)), inputs[:, :4].argmax(1)).backward()
        for parameter in head.parameters() if not averaged else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        if averaged and step % 3 == 2:
            for parameter in head.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()


def validated_before_training(data: torch.Generator) -> None:
    """A network that is used once, before the first step, and differs: it takes no part in training."""
    torch.manual_seed(600 + dist.get_rank())
    model, metric = DistributedDataParallel(network(8, 16, 4)), network(4, 8).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        metric(model.module(torch.randn(8, 8, generator=data))).mean().item()
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(24)
    data = torch.Generator().manual_seed(700 + dist.get_rank())
    if case == "linear_probe":
        linear_probe(data, tuple(range(dist.get_world_size())))
    elif case == "probe_on_rank_zero":
        linear_probe(data, (0,))
    elif case in ("head_reduced_by_hand", "head_averaged_now_and_then"):
        head_by_hand(data, averaged=case == "head_averaged_now_and_then")
    else:
        globals()[case](data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

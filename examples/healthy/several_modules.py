"""Several wrapped modules in one job.

ranks: 2 3
expect: nothing
cases: gan wgan teacher_and_student one_optimizer actor_and_critic wrapped_one_after_the_other
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def wrapped(*widths: int, **options: bool) -> DistributedDataParallel:
    layers: list[nn.Module] = []
    for left, right in itertools.pairwise(widths):
        layers += [nn.Linear(left, right), nn.LeakyReLU(0.2)]
    return DistributedDataParallel(nn.Sequential(*layers[:-1]), **options)


def gan(drawn: torch.Generator, clamped: bool) -> None:
    generator, critic = wrapped(4, 16, 6), wrapped(6, 16, 1, broadcast_buffers=False)
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    for step in range(6):
        real, noise = torch.randn(8, 6, generator=drawn) + 2, torch.randn(8, 4, generator=drawn)
        judges.zero_grad()
        # One forward for both halves: with two, the second backward would go unreduced.
        scores = critic(torch.cat([real, generator(noise).detach()]))
        (scores[8:].mean() - scores[:8].mean()).backward()
        judges.step()
        if clamped:
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        if clamped and step % 2:
            continue  # the critic takes two steps for every one of the generator
        makes.zero_grad()
        critic.requires_grad_(False)
        # Past the wrapper: the critic is not trained here, gradients only pass through it.
        (-critic.module(generator(noise)).mean()).backward()
        critic.requires_grad_(True)
        makes.step()


def teacher_and_student(drawn: torch.Generator) -> None:
    teacher = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).eval().requires_grad_(False)
    student = wrapped(6, 8, 3)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    for _ in range(6):
        inputs = torch.randn(8, 6, generator=drawn)
        optimizer.zero_grad()
        functional.mse_loss(student(inputs), teacher(inputs)).backward()
        optimizer.step()


def one_optimizer(drawn: torch.Generator) -> None:
    encoder, decoder = wrapped(6, 12, 3), wrapped(3, 12, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for _ in range(6):
        inputs = torch.randn(8, 6, generator=drawn)
        optimizer.zero_grad()
        functional.mse_loss(decoder(encoder(inputs)), inputs).backward()
        optimizer.step()


def actor_and_critic(drawn: torch.Generator) -> None:
    actor, critic = wrapped(6, 16, 2), wrapped(6, 16, 1)
    acts, values = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    for step in range(8):
        states, rewards = torch.randn(8, 6, generator=drawn), torch.randn(8, generator=drawn)
        advantage = rewards - critic(states).squeeze(1)
        values.zero_grad()
        advantage.square().mean().backward()
        values.step()
        if step % 2:
            chances = actor(states).log_softmax(1)[:, 0]
            acts.zero_grad()
            (-chances * advantage.detach()).mean().backward()
            acts.step()


def one_after_the_other(drawn: torch.Generator) -> None:
    """A search over widths: each model is trained, judged and let go."""
    for width in (4, 8, 16):
        model = wrapped(6, width, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=drawn)).square().mean().backward()
            optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(23)
    drawn = torch.Generator().manual_seed(600 + dist.get_rank())
    if case.endswith("gan"):
        gan(drawn, clamped=case == "wgan")
    elif case == "teacher_and_student":
        teacher_and_student(drawn)
    elif case == "one_optimizer":
        one_optimizer(drawn)
    elif case == "actor_and_critic":
        actor_and_critic(drawn)
    else:
        one_after_the_other(drawn)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

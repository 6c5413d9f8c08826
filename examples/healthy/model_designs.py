"""Designs of models and schedules: experts, adapters, early exits, quantisation, flows, freezing, growing inputs.

ranks: 2
expect: nothing
cases: experts early_exit fake_quantised adapters checkpointed stochastic_depth freezing_schedule round_robin flow vae
    diffusion ctc folds lookahead weight_averaging progressive_resizing curriculum loss_weights two_models
    tied_language_model spectral_norm layerwise_rates
"""

from __future__ import annotations

import copy
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint

STEPS = 6


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Job:
    """Random batches of this rank, and one common seed for what all ranks decide alike."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(6)
        self.own = torch.Generator().manual_seed(300 + self.rank)
        self.common = torch.Generator().manual_seed(9)

    def wrap(self, network: nn.Module, **options: object) -> DistributedDataParallel:
        model = DistributedDataParallel(network, **options)
        torch.manual_seed(400 + self.rank)
        return model

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.own)

    def train(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *shape: int) -> None:
        minimise(optimizer, model(self.batch(*shape)).square().mean())


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Experts(nn.Module):
    """Each token goes to one expert: which experts a rank uses depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 8, 8) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.gate(tokens).softmax(-1)
        weight, chosen = weights.max(-1)
        outputs = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(-1)
            if len(mine):
                outputs = outputs.index_add(0, mine, weight[mine, None] * expert(tokens[mine]))
        return outputs, (weights.mean(0) ** 2).sum()


def experts(job: Job) -> None:
    model = job.wrap(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        tokens = job.batch(5, 8)
        outputs, balance = model(tokens)
        minimise(optimizer, (outputs - tokens).square().mean() + 0.01 * balance)


def early_exit(job: Job) -> None:
    """The depth of a batch depends on the batch: later layers are unused on some ranks."""

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.exits = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer, leave in zip(self.layers, self.exits, strict=True):
                inputs = layer(inputs).tanh()
                outputs = leave(inputs)
                if outputs.mean() > 0:
                    break
            return outputs

    model = job.wrap(Exits(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        job.train(model, optimizer, 6, 8)


def fake_quantised(job: Job) -> None:
    """Straight-through rounding, ranges followed by an average in a buffer that DDP synchronises."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
            self.register_buffer("range", torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.body(inputs).relu()
            with torch.no_grad():
                self.range.lerp_(hidden.max(), 0.1)
            step = self.range / 15
            rounded = (hidden / step).round().clamp(0, 15) * step
            return self.head(hidden + (rounded - hidden).detach())

    model = job.wrap(Quantised())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        job.train(model, optimizer, 8, 8)


def adapters(job: Job) -> None:
    """Low-rank adapters beside frozen weights, added before wrapping; merged for an evaluation and taken out again."""

    class Adapted(nn.Module):
        def __init__(self, frozen: nn.Linear) -> None:
            super().__init__()
            self.frozen = frozen.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, frozen.in_features) / 4)
            self.up = nn.Parameter(torch.zeros(frozen.out_features, 2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.frozen(inputs) + inputs @ self.down.T @ self.up.T

    model = job.wrap(nn.Sequential(Adapted(nn.Linear(8, 16)), nn.GELU(), Adapted(nn.Linear(16, 4))))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        job.train(model, optimizer, 8, 8)
        if step == 3:
            merged = copy.deepcopy(model.module)
            with torch.no_grad():
                for layer in (merged[0], merged[2]):
                    layer.frozen.weight += layer.up @ layer.down
                merged(job.batch(4, 8))


def checkpointed(job: Job) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(3)
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                inputs = checkpoint(block, inputs, use_reentrant=False)
            return inputs

    model = job.wrap(Recomputed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        job.train(model, optimizer, 8, 8)


def stochastic_depth(job: Job) -> None:
    """Every rank drops other samples' branches."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(mlp(8, 16, 8) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for branch in self.branches:
                kept = (torch.rand(len(inputs), 1) < 0.8).float()
                inputs = inputs + kept / 0.8 * branch(inputs)
            return inputs

    model = job.wrap(Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        job.train(model, optimizer, 8, 8)


def freezing_schedule(job: Job) -> None:
    """Layers are frozen from the bottom, and the model is wrapped again each time."""
    network = mlp(8, 12, 12, 2)
    for frozen in range(3):
        if frozen:
            network[2 * (frozen - 1)].requires_grad_(False)
        model = job.wrap(network)
        optimizer = torch.optim.SGD((p for p in network.parameters() if p.requires_grad), lr=0.05)
        for _ in range(3):
            job.train(model, optimizer, 8, 8)


def round_robin(job: Job) -> None:
    """One task per step, each with its head; the order comes from a common generator."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = mlp(8, 16), nn.ModuleList(nn.Linear(16, 2 + task) for task in range(3))

        def forward(self, inputs: torch.Tensor, task: int) -> torch.Tensor:
            return self.heads[task](self.body(inputs))

    model = job.wrap(Tasks(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        task = int(torch.randint(3, (), generator=job.common))
        minimise(optimizer, model(job.batch(8, 8), task).square().mean())


def flow(job: Job) -> None:
    """Affine couplings; the likelihood needs the determinant of every layer."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mlp(3, 12, 6) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(len(inputs))
            for layer in self.layers:
                one, other = inputs.chunk(2, dim=-1)
                scale, shift = layer(one).chunk(2, dim=-1)
                inputs = torch.cat([other * scale.tanh().exp() + shift, one], dim=-1)
                total = total + scale.tanh().sum(-1)
            return 0.5 * inputs.square().sum(-1) - total

    model = job.wrap(Coupling())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        minimise(optimizer, model(job.batch(8, 6)).mean())


def vae(job: Job) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 16, 6), mlp(3, 16, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mean, spread = self.encoder(inputs).chunk(2, dim=-1)
            latent = mean + spread.exp() * torch.randn_like(mean)
            rebuilt = (self.decoder(latent) - inputs).square().sum(-1)
            return (rebuilt + 0.5 * (mean.square() + (2 * spread).exp() - 2 * spread).sum(-1)).mean()

    model = job.wrap(Vae())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        minimise(optimizer, model(job.batch(8, 8)))


def diffusion(job: Job) -> None:
    """Noise and time steps of each rank's own; a slow average of the weights for sampling."""
    model = job.wrap(mlp(9, 24, 8))
    average = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        clean = job.batch(8, 8)
        time, noise = torch.rand(8, 1), torch.randn(8, 8)
        noisy = (1 - time) * clean + time * noise
        minimise(optimizer, (model(torch.cat([noisy, time], dim=-1)) - noise).square().mean())
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)


def ctc(job: Job) -> None:
    """Targets of different lengths; the loss is a mean over samples."""
    model = job.wrap(nn.GRU(6, 8, batch_first=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        outputs, _ = model(job.batch(12, 4, 6))
        lengths = torch.randint(2, 5, (4,), generator=job.own)
        targets = torch.randint(1, 8, (int(lengths.sum()),), generator=job.own)
        loss = functional.ctc_loss(outputs.log_softmax(-1), targets, torch.full((4,), 12), lengths)
        minimise(optimizer, loss)


def folds(job: Job) -> None:
    """Cross-validation in one process: a new model, wrapper and optimizer for each fold."""
    for fold in range(3):
        torch.manual_seed(fold)
        model = job.wrap(mlp(8, 12, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            job.train(model, optimizer, 8, 8)
        with torch.no_grad():
            model.module.eval()(job.batch(8, 8))


def lookahead(job: Job) -> None:
    """Slow weights follow the fast ones every third step, and the fast ones start from there."""
    model = job.wrap(mlp(8, 12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]
    for step in range(2 * STEPS):
        job.train(model, optimizer, 8, 8)
        if step % 3 == 2:
            with torch.no_grad():
                for kept, fast in zip(slow, model.parameters(), strict=True):
                    fast.copy_(kept.lerp_(fast, 0.5))


def weight_averaging(job: Job) -> None:
    """Stochastic weight averaging; statistics of BatchNorm are computed again on data that all ranks share."""
    model = job.wrap(nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2)))
    averaged = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for step in range(STEPS):
        job.train(model, optimizer, 8, 8)
        if step > 2:
            averaged.update_parameters(model.module)
            schedule.step()
    torch.optim.swa_utils.update_bn([torch.randn(8, 8, generator=job.common) for _ in range(2)], averaged)


def progressive_resizing(job: Job) -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )
    model = job.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        side, rows = 8 + 4 * (step // 2), 8 - 2 * (step // 2)
        job.train(model, optimizer, rows, 1, side, side)


def curriculum(job: Job) -> None:
    """Longer sequences from step to step, sorted by length on every rank."""
    model = job.wrap(nn.LSTM(6, 8, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        outputs, _ = model(job.batch(4, 2 + 2 * step, 6))
        minimise(optimizer, outputs.square().mean())


def loss_weights(job: Job) -> None:
    """Uncertainties weigh the tasks: they are wrapped and trained with the model."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spreads = mlp(8, 12, 3), nn.Parameter(torch.zeros(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            losses = (self.body(inputs) - inputs[:, :3]).square().mean(0)
            return ((-self.spreads).exp() * losses + self.spreads).sum()

    model = job.wrap(Weighted())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        minimise(optimizer, model(job.batch(8, 8)))


def two_models(job: Job) -> None:
    """One model's output is the next one's input; both are wrapped, one optimizer steps both."""
    encoder, decoder = job.wrap(mlp(8, 12, 4)), job.wrap(mlp(4, 12, 8))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for _ in range(STEPS):
        inputs = job.batch(8, 8)
        minimise(optimizer, (decoder(encoder(inputs)) - inputs).square().mean())


def tied_language_model(job: Job) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embedding(tokens))[0])

    model = job.wrap(Language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        tokens = torch.randint(20, (4, 9), generator=job.own)
        minimise(optimizer, functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]))


def spectral_norm(job: Job) -> None:
    """Power iterations in buffers, updated by every forward."""
    model = job.wrap(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        job.train(model, optimizer, 8, 8)


def layerwise_rates(job: Job) -> None:
    """A rate per layer, and no weight decay for biases: many parameter groups."""
    model = job.wrap(mlp(8, 12, 12, 2))
    groups = [
        {"params": [p], "lr": 0.05 * 0.8**index, "weight_decay": 0.01 * (p.ndim > 1)}
        for index, p in enumerate(model.parameters())
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    for _ in range(STEPS):
        job.train(model, optimizer, 8, 8)
        schedule.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[case](Job())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

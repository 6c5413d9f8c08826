"""Healthy DDP training loops, one small function each: ddpcheck must change no bit and raise nothing.

Each function runs inside a rank whose process group is made, and returns what is to be hashed: modules,
optimizers, tensors, plain values. SyncBatchNorm is not among them: torch refuses it on CPU.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 4
WIDTH = 8

Variant = Callable[[int, int], list[Any]]
VARIANTS: dict[str, Variant] = {}
# Variants that make no sense below a world size.
LEAST_RANKS: dict[str, int] = {}
_STORES = iter(range(1_000_000))


def variant(least: int = 1) -> Callable[[Variant], Variant]:
    def add(function: Variant) -> Variant:
        VARIANTS[function.__name__] = function
        LEAST_RANKS[function.__name__] = least
        return function

    return add


def make_group(rank: int, world_size: int) -> None:
    """Each call meets in a file of its own below JOB_STORE; all ranks call it equally often."""
    path = f"{os.environ['JOB_STORE']}-{next(_STORES)}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)


def net(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def batches(rank: int, steps: int = STEPS, shape: tuple[int, ...] = (6, WIDTH)) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(*shape, generator=generator)


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def fit(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> list[Any]:
    for batch in batches(rank, steps):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def plain(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01), rank)


@variant()
def accumulation(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank, 6)):
        if number % 3 < 2:
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            continue
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [ddp, optimizer]


@variant()
def accumulation_uneven(rank: int, world_size: int) -> list[Any]:
    """Ranks take different numbers of micro-batches, with BatchNorm, as with packed sequences."""
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    for step in range(12):
        micro = list(batches(rank + 10 * step, 1 + (rank + step) % 3))
        with ddp.no_sync():
            for batch in micro[:-1]:
                ddp(batch).square().mean().backward()
        ddp(micro[-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [ddp, optimizer]


class Branches(nn.Module):
    """Takes one of two ways; the other's parameters go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)])
        self.out = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor, way: int) -> torch.Tensor:
        return self.out(self.ways[way](batch))


@variant()
def find_unused(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        # Everybody the same way, then each rank its own.
        ddp(batch, 0 if number < 2 else (rank + number) % 2).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def find_unused_accumulated(rank: int, world_size: int) -> list[Any]:
    """The last micro-batch leaves out what the first one used: DDP reduces the gradients left from then."""
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(batch, 0).square().mean().backward()
        ddp(batch + 1, (rank + number) % 2 if number > 1 else 1).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def gradients_never_cleared(rank: int, world_size: int) -> list[Any]:
    """A running sum of gradients, with layers that some backwards leave out on some ranks, or on all."""
    torch.manual_seed(1)
    ddp = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = sgd(ddp, lr=0.001)
    for number, batch in enumerate(batches(rank, 8)):
        ddp(batch, number % 2 if number < 4 else (rank + number) % 2).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def buffers_by_hook(rank: int, world_size: int) -> list[Any]:
    """A hook of the user's own synchronises the buffers, and is not done before the backward is."""

    def add_up(state: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
        return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]

    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    after_forward = nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    ddp._register_buffer_comm_hook(None, add_up, after_forward)
    return fit(ddp, sgd(ddp), rank)


@variant()
def freeze_midway(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), find_unused_parameters=True)
    optimizer = sgd(ddp)
    fit(ddp, optimizer, rank, 2)
    ddp.module[0].requires_grad_(False)
    return fit(ddp, optimizer, rank, 3)


@variant()
def static_graph(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), static_graph=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def bucket_view(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), gradient_as_bucket_view=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def small_buckets(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net(), bucket_cap_mb=0.0001)
    return fit(ddp, sgd(ddp), rank)


@variant()
def bf16_autocast(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        loss.backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def grad_scaler(rank: int, world_size: int) -> list[Any]:
    """One overflow, which the reduction spreads to all ranks: every rank skips that step."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        if number == 2 and rank == world_size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [ddp, optimizer, scaler.state_dict()]


@variant()
def clipping(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
        optimizer.step()
    return [ddp, optimizer]


@variant()
def fp16_hook(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return fit(ddp, sgd(ddp), rank)


@variant()
def bf16_hook(rank: int, world_size: int) -> list[Any]:
    # Under another name, since by its own torch refuses it without NCCL.
    def squeezed(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = DDP(net())
    ddp.register_comm_hook(None, squeezed)
    return fit(ddp, sgd(ddp), rank)


@variant()
def neutral_hook(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return fit(ddp, sgd(ddp), rank)


@variant()
def power_sgd(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return fit(ddp, sgd(ddp), rank, 6)


@variant()
def join_uneven(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    with ddp.join():
        fit(ddp, optimizer, rank, 3 + rank)
    return [ddp]


@variant()
def join_live_ranks(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    with ddp.join(divide_by_initial_world_size=False):
        fit(ddp, optimizer, rank, 2 + (world_size - rank))
    return [ddp]


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


@variant()
def batch_norm(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def batch_norm_unsynced(rank: int, world_size: int) -> list[Any]:
    """Statistics stay local by choice."""
    ddp = DDP(normed(), broadcast_buffers=False)
    return fit(ddp, sgd(ddp), rank)


@variant()
def buffer_made_late(rank: int, world_size: int) -> list[Any]:
    """A cache that grows with the longest sequence seen, as rotary embeddings keep it."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table") or len(self.table) < len(batch):
                self.register_buffer("table", torch.arange(float(len(batch))), persistent=False)
            return self.linear(batch) * self.table[: len(batch), None].cos()

    torch.manual_seed(2)
    ddp = DDP(Cached())
    optimizer = sgd(ddp)
    for number, batch in enumerate(batches(rank, STEPS)):
        optimizer.zero_grad()
        ddp(batch[: 2 + number]).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def gan(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(7)
    generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WIDTH)))
    critic = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), broadcast_buffers=False)
    makes = torch.optim.Adam(generator.parameters(), lr=0.01)
    judges = torch.optim.Adam(critic.parameters(), lr=0.02)
    noise = batches(rank + 50, shape=(6, 3))
    for batch, drawn in zip(batches(rank), noise, strict=True):
        judges.zero_grad()
        (critic(generator(drawn).detach()).mean() - critic.module(batch).mean() * 0).backward()
        judges.step()
        makes.zero_grad()
        critic.requires_grad_(False)
        (-critic.module(generator(drawn)).mean()).backward()
        critic.requires_grad_(True)
        makes.step()
    return [generator, critic, makes, judges]


@variant()
def frozen_layers(rank: int, world_size: int) -> list[Any]:
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    wanted = [p for p in ddp.parameters() if p.requires_grad]
    return fit(ddp, torch.optim.SGD(wanted, lr=0.1), rank)


@variant()
def ema_aside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    averaged = torch.optim.swa_utils.AveragedModel(
        ddp.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(ddp.module)
    return [ddp, optimizer, averaged]


@variant()
def ema_swapped(rank: int, world_size: int) -> list[Any]:
    """Averaged weights go in for evaluation and the trained ones come back."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    shadow = [p.detach().clone() for p in ddp.parameters()]
    losses = []
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        kept = [p.detach().clone() for p in ddp.parameters()]
        for average, parameter in zip(shadow, ddp.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            parameter.data.copy_(average)
        with torch.no_grad():
            losses.append(ddp(batch).mean())
        for parameter, old in zip(ddp.parameters(), kept, strict=True):
            parameter.data.copy_(old)
    return [ddp, optimizer, shadow, losses]


def fit_once(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    ddp(batch).square().mean().backward()
    optimizer.step()


@variant()
def ema_swapped_on_rank_0(rank: int, world_size: int) -> list[Any]:
    """Only rank 0 evaluates with averaged weights, and puts the trained ones back before the next forward."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    shadow = copy.deepcopy(ddp.module)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        if rank == 0:
            kept = copy.deepcopy(ddp.module.state_dict())
            ddp.module.load_state_dict(shadow.state_dict())
            with torch.no_grad():
                ddp.module(batch)
            ddp.module.load_state_dict(kept)
    return [ddp, optimizer]


@variant()
def weights_clamped(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.RMSprop(ddp.parameters(), lr=0.01)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        for parameter in ddp.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return [ddp, optimizer]


@variant()
def zero_optimizer(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    fit(ddp, optimizer, rank)
    return [ddp, optimizer.optim]


@variant()
def zero_optimizer_views(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(net(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01
    )
    fit(ddp, optimizer, rank)
    return [ddp, optimizer.optim]


@variant()
def compiled_outside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(torch.compile(ddp, backend="eager"), sgd(ddp), rank)


@variant()
def compiled_inside(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(torch.compile(net(), backend="eager"))
    return fit(ddp, sgd(ddp), rank)


@variant()
def compiled_outside_aot(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(torch.compile(ddp, backend="aot_eager"), sgd(ddp), rank)


@variant()
def compiled_inside_aot(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(torch.compile(normed(), backend="aot_eager"))
    return fit(ddp, sgd(ddp), rank)


@variant()
def compiled_optimizer(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    step = torch.compile(optimizer.step, backend="eager")
    for batch in batches(rank):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        step()
    return [ddp, optimizer]


@variant()
def evaluation(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    seen = []
    for epoch in range(3):
        ddp.train()
        for batch in batches(rank + 10 * epoch, 2):
            fit_once(ddp, optimizer, batch)
        ddp.eval()
        with torch.no_grad():
            seen += [ddp(batch).mean() for batch in batches(rank, 2)]
    return [ddp, optimizer, seen]


@variant()
def evaluation_on_rank_0(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    for epoch in range(3):
        ddp.train()
        for batch in batches(rank + 10 * epoch, 2):
            fit_once(ddp, optimizer, batch)
        if rank == 0:
            ddp.eval()
            with torch.no_grad():
                for batch in batches(rank, 2):
                    ddp.module(batch)
        dist.barrier()
    return [ddp, optimizer]


def saved_by_rank_0(rank: int, state: Any) -> Any:
    """What all ranks load after rank 0 has saved it."""
    path = Path(tempfile.gettempdir()) / f"{os.path.basename(os.environ['JOB_STORE'])}.pt"
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    loaded = torch.load(path, weights_only=True)
    dist.barrier()
    if rank == 0:
        path.unlink()
    return loaded


@variant()
def checkpoint_before(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    model = nn.Linear(WIDTH, 4)
    model.load_state_dict(saved_by_rank_0(rank, model.state_dict()))
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


@variant()
def checkpoint_after(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(normed())
    optimizer = sgd(ddp)
    fit(ddp, optimizer, rank, 2)
    state = saved_by_rank_0(rank, {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()})
    fit(ddp, optimizer, rank, 2)
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return fit(ddp, optimizer, rank)


@variant()
def seed_per_rank(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.3), nn.Linear(12, 4))
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


@variant()
def optimizer_in_backward(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    class NoStream:
        def wait_stream(self, other: Any) -> None:
            pass

    # torch asks for the stream of an accelerator here even where there is none.
    torch.accelerator.current_stream = NoStream
    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DDP(model)
    for batch in batches(rank):
        ddp(batch).square().mean().backward()
    return [ddp]


@variant()
def hand_written(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    for batch in batches(rank):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        for parameter in ddp.parameters():
            parameter.data -= 0.1 * parameter.grad
    return [ddp]


class Split(IterableDataset[torch.Tensor]):
    """Every rank takes its own share of one stream."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, sample in enumerate(batches(0, 24, (WIDTH,))):
            if number % self.world_size == self.rank and number < 24 - 24 % self.world_size:
                yield sample


@variant()
def iterable(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in DataLoader(Split(rank, world_size), batch_size=2, drop_last=True):
        fit_once(ddp, optimizer, batch)
    return [ddp, optimizer]


@variant()
def loader_workers(rank: int, world_size: int) -> list[Any]:
    """Workers, shuffling and dropout: all draw random numbers that watching must not disturb."""
    torch.manual_seed(11 + rank)
    ddp = DDP(nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.5), nn.Linear(12, 4)))
    optimizer = sgd(ddp)
    data = TensorDataset(torch.randn(24 * world_size, WIDTH, generator=torch.Generator().manual_seed(4)))
    sampler: Any = DistributedSampler(data, world_size, rank, shuffle=True)
    loader = DataLoader(data, batch_size=6, sampler=sampler, num_workers=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            fit_once(ddp, optimizer, batch)
    return [ddp, optimizer, torch.get_rng_state(), torch.randn(3)]


@variant()
def activation_checkpointing(rank: int, world_size: int) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, batch, use_reentrant=False))

    torch.manual_seed(6)
    ddp = DDP(Checkpointed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def activation_checkpointing_reentrant(rank: int, world_size: int) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(), nn.Linear(4, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, batch.requires_grad_(), use_reentrant=True))

    torch.manual_seed(6)
    ddp = DDP(Checkpointed(), static_graph=True)
    return fit(ddp, sgd(ddp), rank)


@variant()
def mixed_dtypes(rank: int, world_size: int) -> list[Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(WIDTH, 8)
            self.fine = nn.Linear(8, 8, dtype=torch.float64)
            self.coarse = nn.Linear(8, 4, dtype=torch.bfloat16)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.coarse(self.fine(self.single(batch).double()).bfloat16()).float()

    torch.manual_seed(8)
    ddp = DDP(Mixed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def tied_weights(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


class Sparse(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.words = nn.Embedding(16, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words))


class Counting:
    """What a mode of the user's hears of, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Counter[str] = Counter()

    def hear(self, function: Any, args: Any, kwargs: Any) -> Any:
        # Of a property only its getter has a name, and one that all of them share.
        self.heard[str(getattr(function, "__self__", function)).partition(" at 0x")[0]] += 1
        return function(*args, **(kwargs or {}))


class CountingFunctions(Counting, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.hear(func, args, kwargs)


class CountingOperators(Counting, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.hear(func, args, kwargs)


@variant()
def counted_by_modes(rank: int, world_size: int) -> list[Any]:
    """Modes are the user's code: they hear of what the job does, and of nothing else."""
    # Of these dtypes a sketch takes operators of torch.
    with CountingFunctions() as functions, CountingOperators() as operators:
        ddp = DDP(net().to(torch.float64))
        optimizer = sgd(ddp)
        for number in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.full((3, WIDTH), rank + number, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return [ddp, optimizer, sorted(functions.heard.items()), sorted(operators.heard.items())]


@variant()
def wrapped_gradients(rank: int, world_size: int) -> list[Any]:
    """A tensor subclass that wraps others has an address, and nothing is there: so have gradients made of it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubled())
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    ddp = DDP(module)
    optimizer = sgd(ddp)
    for number in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.full((3, WIDTH), float(rank + number))).square().mean().backward()
        optimizer.step()
    return [ddp.module[0]]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@variant()
def functions_by_pickle(rank: int, world_size: int) -> list[Any]:
    """A pool that loads files is sent `torch.load` so, and an executor the way into the process group."""
    sent = [torch.load, dist.init_process_group, dist.destroy_process_group]
    assert all(pickle.loads(pickle.dumps(function)) is function for function in sent)
    ddp = DDP(net())
    return fit(ddp, sgd(ddp), rank)


@variant()
def sparse_adam(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(Sparse())
    sparse = torch.optim.SparseAdam(ddp.module.words.parameters(), lr=0.01)
    dense = torch.optim.Adam(ddp.module.out.parameters(), lr=0.01)
    for number in range(STEPS):
        ddp.zero_grad()
        ddp(torch.tensor([rank, number, 7])).square().mean().backward()
        sparse.step()
        dense.step()
    return [ddp, sparse, dense]


@variant()
def sparse_sgd(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(Sparse())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.tensor([rank, number, 7])).square().mean().backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def complex_parameters(rank: int, world_size: int) -> list[Any]:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(batch) * self.filter, n=WIDTH)

    torch.manual_seed(12)
    ddp = DDP(Spectral())
    return fit(ddp, sgd(ddp), rank)


@variant()
def odd_shapes(rank: int, world_size: int) -> list[Any]:
    """A part without parameters, an empty parameter, one without dimensions."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Identity()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("none", torch.zeros(0))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.nothing(self.linear(batch)) * self.scale + self.empty.sum()

    torch.manual_seed(13)
    ddp = DDP(Odd())
    return fit(ddp, sgd(ddp), rank)


@variant()
def non_contiguous(rank: int, world_size: int) -> list[Any]:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH).t())
            self.part = nn.Parameter(torch.randn(4, 8)[:, ::2])

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch @ self.weight @ self.part

    torch.manual_seed(14)
    ddp = DDP(Transposed())
    return fit(ddp, sgd(ddp), rank)


@variant()
def channels_last(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(15)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    ddp = DDP(model.to(memory_format=torch.channels_last))
    optimizer = sgd(ddp)
    for batch in batches(rank, 3, (2, 3, 8, 8)):
        fit_once(ddp, optimizer, batch.to(memory_format=torch.channels_last))
    return [ddp, optimizer]


@variant()
def several_optimizers(rank: int, world_size: int) -> list[Any]:
    """Two optimizers on one module, one of them stepping every other time."""
    ddp = DDP(net())
    often = torch.optim.Adam(ddp.module[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD([*ddp.module[2].parameters(), *ddp.module[4].parameters()], lr=0.1)
    for number, batch in enumerate(batches(rank, 6)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        often.step()
        if number % 2:
            seldom.step()
    return [ddp, often, seldom]


@variant()
def optimizer_made_anew(rank: int, world_size: int) -> list[Any]:
    """A new optimizer for every phase, the old one let go."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for phase in range(3):
        optimizer = sgd(ddp, lr=0.1 / (1 + phase))
        fit(ddp, optimizer, rank, 2)
    return [ddp, optimizer]


@variant()
def lbfgs(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3)
    for batch in batches(rank, 3):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            # What steers the line search must be the same on all ranks.
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            return shared

        optimizer.step(closure)
    return [ddp, optimizer]


@variant()
def tensor_lr(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch in batches(rank):
        fit_once(ddp, optimizer, batch)
        scheduler.step()
    return [ddp, optimizer]


@variant()
def fused_optimizer(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    return fit(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True, amsgrad=True), rank)


@variant()
def scheduler(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    optimizer = sgd(ddp)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in batches(rank, 6):
        fit_once(ddp, optimizer, batch)
        cycle.step()
    for batch in batches(rank, 3):
        fit_once(ddp, optimizer, batch)
        metric = ddp(batch).detach().mean()
        dist.all_reduce(metric)
        plateau.step(metric)
    return [ddp, optimizer, plateau.state_dict()]


@variant(least=2)
def subgroup(rank: int, world_size: int) -> list[Any]:
    """Only the first ranks train, in a group of their own."""
    members = list(range(max(1, world_size - 1)))
    group = dist.new_group(members)
    if rank not in members:
        return []
    ddp = DDP(net(), process_group=group)
    return fit(ddp, sgd(ddp), rank)


@variant(least=4)
def two_subgroups(rank: int, world_size: int) -> list[Any]:
    """Two groups train two models that have nothing to do with each other."""
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, world_size)))]
    torch.manual_seed(rank // 2)
    ddp = DDP(nn.Linear(WIDTH, 4), process_group=groups[rank >= 2])
    return fit(ddp, sgd(ddp), rank, 3 if rank < 2 else 5)


@variant()
def group_made_again(rank: int, world_size: int) -> list[Any]:
    first = DDP(net())
    optimizer = sgd(first)
    fit(first, optimizer, rank, 2)
    model = first.module
    del first
    dist.destroy_process_group()
    make_group(rank, world_size)
    again = DDP(model)
    return fit(again, optimizer, rank, 3)


@variant()
def wrapped_again(rank: int, world_size: int) -> list[Any]:
    """A layer is unfrozen the right way: wrap anew, with a new optimizer."""
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    fit(ddp, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), rank)
    del ddp
    model[0].requires_grad_(True)
    again = DDP(model)
    return fit(again, sgd(again), rank)


@variant()
def codebook(rank: int, world_size: int) -> list[Any]:
    """A buffer updated in forward from statistics that were reduced first."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("codes", torch.randn(4))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            out = self.linear(batch)
            if self.training:
                seen = out.detach().mean(0)
                dist.all_reduce(seen)
                self.codes.mul_(0.9).add_(seen / dist.get_world_size(), alpha=0.1)
            return out - self.codes

    torch.manual_seed(16)
    ddp = DDP(Quantised())
    return fit(ddp, sgd(ddp), rank)


@variant()
def ignored_parameters(rank: int, world_size: int) -> list[Any]:
    """What DDP is told to leave alone may differ, and is trained locally."""
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, 4))
    with torch.no_grad():
        model[1].weight.add_(rank)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


@variant()
def parametrised(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(18)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 12)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4)),
    )
    ddp = DDP(model)
    return fit(ddp, sgd(ddp), rank)


@variant()
def second_order(rank: int, world_size: int) -> list[Any]:
    """A gradient penalty by way of autograd.grad on the inputs."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for batch in batches(rank):
        optimizer.zero_grad()
        batch.requires_grad_()
        out = ddp.module(batch)
        (slope,) = torch.autograd.grad(out.sum(), batch)
        (ddp(batch).square().mean() + 0 * slope.norm().detach()).backward()
        optimizer.step()
    return [ddp, optimizer]


@variant()
def no_training(rank: int, world_size: int) -> list[Any]:
    """Wrapped and only evaluated."""
    ddp = DDP(normed()).eval()
    with torch.no_grad():
        return [ddp, [ddp(batch) for batch in batches(rank)]]


@variant()
def no_module(rank: int, world_size: int) -> list[Any]:
    """A process group and collectives, but nothing wrapped."""
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return [total]


@variant()
def module_let_go(rank: int, world_size: int) -> list[Any]:
    """Models come and go in one process, as in a search over settings."""
    losses = []
    for width in (4, 6):
        torch.manual_seed(width)
        ddp = DDP(nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, 2)))
        optimizer = sgd(ddp)
        fit(ddp, optimizer, rank, 2)
        losses.append([p.detach().clone() for p in ddp.parameters()])
        del ddp, optimizer
    return losses


@variant(least=2)
def post_local_sgd(rank: int, world_size: int) -> list[Any]:
    """Parameters rightly differ between two averagings."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DDP(net())
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(optim=torch.optim.SGD(ddp.parameters(), lr=0.1), averager=averager)
    for batch in batches(rank, 8):
        fit_once(ddp, optimizer, batch)
    return [ddp, optimizer.optim]

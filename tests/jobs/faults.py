"""Broken DDP training loops, one small function each, with the finding that ddpcheck must report.

Their ranks are forked from one parent, like those of the healthy jobs:

    python faults.py --faults bypass,unused --out results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parent))

import battery
import forking
import variants
from variants import batches, net

LAST_STEP = 6


@dataclass(frozen=True)
class Fault:
    """A broken job and the finding that it must cause."""

    run: Callable[[int, int], Any]
    code: str
    # A name that the cause must contain; the wording around it is not tested.
    cause: str
    step: int
    ranks: tuple[int, ...]
    world_size: int


FAULTS: dict[str, Fault] = {}


def fault(
    code: str, cause: str, step: int, ranks: tuple[int, ...], world_size: int = 2
) -> Callable[[Callable[[int, int], Any]], Callable[[int, int], Any]]:
    def add(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        FAULTS[function.__name__] = Fault(function, code, cause, step, ranks, world_size)
        return function

    return add


def setup(**options: Any) -> tuple[nn.Module, DDP, torch.optim.Optimizer]:
    model = net()
    return model, DDP(model, **options), torch.optim.SGD(model.parameters(), lr=0.1)


@fault("DDP202", "bypass", 2, (0, 1))
def bypass(rank: int, world_size: int) -> None:
    model, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        (ddp if step < 2 else model)(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP202", "no_sync", 1, (0, 1, 2), world_size=3)
def no_sync_never_left(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    never_left = ddp.no_sync()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        if step == 1:
            never_left.__enter__()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP202", "no_sync", 1, (0, 1))
def backward_outside_no_sync(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        if step == 0:
            loss = ddp(inputs).square().mean()
        else:
            with ddp.no_sync():
                loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()


@fault("DDP202", "forward", 0, (0, 1))
def two_forwards(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for inputs in batches(rank, LAST_STEP):
        optimizer.zero_grad()
        losses = [ddp(part).square().mean() for part in inputs.chunk(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()


@fault("DDP202", "second backward", 1, (0, 1))
def second_backward(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        output = ddp(inputs)
        output.square().mean().backward(retain_graph=step > 0)
        if step > 0:
            output.abs().mean().backward()
        optimizer.step()


class Branching(nn.Module):
    """Skips a layer on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        output = self.used(inputs)
        return self.sometimes(output) if both else output


@fault("DDP202", "sometimes.weight", 2, (0, 1))
def unused(rank: int, world_size: int) -> None:
    """DDP itself raises only in the next forward, after the wrong step."""
    model = Branching()
    ddp, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step, inputs in enumerate(batches(rank, 3)):
        optimizer.zero_grad()
        ddp(inputs, both=step < 2).square().mean().backward()
        optimizer.step()


@fault("DDP202", "backward", 0, (0, 1))
def by_hand(rank: int, world_size: int) -> None:
    model, ddp, optimizer = setup()
    for inputs in batches(rank, LAST_STEP):
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(ddp(inputs).square().mean(), parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()


@fault("DDP202", "hooks", 1, (0, 1))
def hooks_lost(rank: int, world_size: int) -> None:
    """To another dtype and back: torch replaces the gradient accumulators that DDP had hooked."""
    model, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        if step == 1:
            model.double()
            model.float()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP205", "rank 1", 3, (1,), world_size=3)
def clipped_on_one(rank: int, world_size: int) -> None:
    model, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        if step == 3 and rank == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@fault("DDP205", "", 0, (0, 1))
def clipped_by_rank(rank: int, world_size: int) -> None:
    model, ddp, optimizer = setup()
    for inputs in batches(rank, LAST_STEP):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * (rank + 1))
        optimizer.step()


@fault("DDP205", "0.001", 2, (2,), world_size=3)
def clamped_through_data(rank: int, world_size: int) -> None:
    """Through `.data`, as old code does it: no version counter changes."""
    model, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        if step == 2 and rank == 2:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.clamp_(-1e-3, 1e-3)
        optimizer.step()


@fault("DDP205", "", 2, (1,), world_size=3)
def embedding_silenced_through_data(rank: int, world_size: int) -> None:
    """The gradient of an embedding is large and almost all zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50_000, 8), nn.Flatten(), nn.Linear(24, 1))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    tokens = torch.Generator().manual_seed(rank)
    for step in range(LAST_STEP + 1):
        optimizer.zero_grad()
        ddp(torch.randint(50_000, (8, 3), generator=tokens)).square().mean().backward()
        gradient = model[0].weight.grad
        if step >= 2 and rank == 1 and gradient is not None:
            gradient.data.zero_()
        optimizer.step()


@fault("DDP205", "", 9, (1,), world_size=3)
def large_layer_scaled_through_data(rank: int, world_size: int) -> None:
    """After the first steps, in which all gradients are read twice, and only in a large gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(520, 520), nn.Linear(520, 1))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    inputs = torch.Generator().manual_seed(rank)
    for step in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(4, 520, generator=inputs)).square().mean().backward()
        gradient = model[0].weight.grad
        if step == 9 and rank == 1 and gradient is not None:
            gradient.data.mul_(3)
        optimizer.step()


def hooked(change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Train with a communication hook that reduces like DDP and then applies `change`."""
    rank = dist.get_rank()
    _, ddp, optimizer = setup()
    calls = iter(range(1000))

    # Without annotations: DDP rejects annotations that are strings.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        flat = bucket.buffer().div_(dist.get_world_size())
        call = next(calls)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: change(f.value()[0], call))

    ddp.register_comm_hook(None, hook)
    for inputs in batches(rank, LAST_STEP):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP203", "hooked.<locals>.hook", 2, (2,), world_size=3)
def corrupted(rank: int, world_size: int) -> None:
    def flip(flat: torch.Tensor, call: int) -> torch.Tensor:
        if rank == 2 and call == 2:
            flat.view(torch.int32)[5] ^= 1 << 24
        return flat

    hooked(flip)


@fault("DDP204", "hooked.<locals>.hook", 0, (0, 1))
def never_divided(rank: int, world_size: int) -> None:
    hooked(lambda flat, call: flat * world_size)


@fault("DDP204", "hooked.<locals>.hook", 3, (0, 1, 2), world_size=3)
def divided_twice(rank: int, world_size: int) -> None:
    hooked(lambda flat, call: flat / world_size if call >= 3 else flat)


@fault("DDP209", "NaN", 2, (1,))
def poisoned(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        (loss * float("nan") if step == 2 and rank == 1 else loss).backward()
        optimizer.step()


@fault("DDP207", "rank 1", 2, (1,), world_size=3)
def skipped_on_one(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        if step != 2 or rank != 1:
            optimizer.step()


@fault("DDP206", "GradScaler.scale", 0, (0, 1))
def scales_differ(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    for inputs in batches(rank, LAST_STEP):
        optimizer.zero_grad()
        scaler.scale(ddp(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@fault("DDP206", "lr", 3, (2,), world_size=3)
def rates_differ(rank: int, world_size: int) -> None:
    _, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        if step == 3 and rank == 2:
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP208", "rank 0", 2, (0,), world_size=3)
def loaded_on_one(rank: int, world_size: int) -> None:
    model, ddp, optimizer = setup()
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        if step == 2 and rank == 0:
            torch.manual_seed(99)
            model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


@fault("DDP104", "unfrozen", 2, (0, 1))
def unfrozen(rank: int, world_size: int) -> None:
    model = net()
    model[2].requires_grad_(False)
    ddp, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step, inputs in enumerate(batches(rank, LAST_STEP)):
        if step == 2:
            model[2].requires_grad_(True)
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()


class HalfBlind(nn.Module):
    """Takes a batch of its own and one that is equal on all ranks, and uses only the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, own: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
        return self.inner(common)


@fault("DDP304", "", -1, (0, 1))
def twins(rank: int, world_size: int) -> None:
    model = HalfBlind()
    ddp, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for own, common in zip(batches(rank + 1, LAST_STEP), batches(0, LAST_STEP), strict=True):
        optimizer.zero_grad()
        ddp(own, common).square().mean().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default="all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    forking.prepare()
    names = list(FAULTS) if options.faults == "all" else options.faults.split(",")
    results = []
    for name in names:
        expected = FAULTS[name]
        variants.VARIANTS[name], variants.LEAST_RANKS[name] = expected.run, 2
        outcome = battery.run_job(name, expected.world_size)
        row = {key: value for key, value in asdict(expected).items() if key != "run"}
        results.append({"name": name, **row, "exits": outcome["exits"], "errors": outcome["errors"]})
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

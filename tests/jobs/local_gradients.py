"""Trains with each way in which DDP treats gradients, and writes sketches of the true local gradients.

    python local_gradients.py --world-sizes 1,2 --out FOLDER

A copy of the module without DDP computes the true gradient from the same parameters, inputs and earlier gradients.
FOLDER/WORLD_SIZE-RANK.json lists, for each variant in the order of the wrapped modules, the sketches of all parameters
at each backward that DDP reduces. `--never-hold` breaks ddpcheck in the ranks: all local gradients are read at the end
of the backward. A test has to notice that.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.optim  # slow to import: once here instead of once in each rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

import forking
from variants.small_jobs import make_group

from ddpcheck.probes.sketches.sketch import sketch

WIDTH = 24
# Larger than a piece of a sketch.
LARGE = 190
STEPS = 3
# Several buckets: the first ones are reduced while the backward still runs.
BUCKET_MB = 0.02

Rows = list[tuple[float, float, int]]


class Net(nn.Module):
    """With a frozen parameter, a branch that a rank may leave out, and one that nobody uses."""

    def __init__(self, reentrant: bool | None = None, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.first = nn.Linear(WIDTH, LARGE)
        self.middle = nn.Sequential(nn.Linear(LARGE, LARGE), nn.Tanh(), nn.Linear(LARGE, WIDTH))
        self.side = nn.Linear(WIDTH, WIDTH)
        if unused:
            self.never = nn.Linear(3, 3)
        self.last = nn.Linear(WIDTH, 4)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor, side: bool = True) -> torch.Tensor:
        hidden = self.first(inputs * self.scale)
        if self.reentrant is None:
            hidden = self.middle(hidden)
        else:
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        if side:
            hidden = hidden + self.side(hidden)
        return self.last(hidden).square().mean()


class Trial:
    """A module under DDP, and its twin without DDP that computes the true local gradients."""

    # How many modules DDP has wrapped: the index of the next one in the records.
    wrapped = 0

    def __init__(self, rank: int, model: Net | None = None, **options: Any) -> None:
        self.rank = rank
        self.model = model or Net()
        self.twin = copy.deepcopy(self.model)
        self.ddp = DDP(self.model, bucket_cap_mb=BUCKET_MB, **options)
        Trial.wrapped += 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.expected: list[Rows] = []
        self._generator = torch.Generator().manual_seed(100 + rank)

    def inputs(self) -> torch.Tensor:
        return torch.randn(6, WIDTH, generator=self._generator) * (1 + self.rank)

    def backward(
        self,
        reduced: bool = True,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **how: Any,
    ) -> None:
        """One micro-batch. `reduced`: DDP reduces the gradients after this backward."""
        inputs = self.inputs()
        # First: an optimizer in the backward changes the parameters.
        self._twin_backward(inputs, how, reduced)
        with nullcontext() if reduced else self.ddp.no_sync():
            loss = self.ddp(inputs, **how)
            with around():
                loss.backward()

    def _twin_backward(self, inputs: torch.Tensor, how: dict[str, Any], reduced: bool) -> None:
        pairs = list(zip(self.model.parameters(), self.twin.parameters(), strict=True))
        for own, twin in pairs:
            twin.data.copy_(own.data)
            twin.grad = None if own.grad is None else own.grad.clone()
        self.twin(inputs, **how).backward()
        if reduced:
            gradients = [twin.grad for _, twin in pairs]
            sketches = [None if gradient is None else sketch(gradient) for gradient in gradients]
            self.expected.append([(0.0, 0.0, 0) if each is None else each[:3] for each in sketches])

    def train(self, set_to_none: bool = True, micro_batches: int = 1, **how: Any) -> Trial:
        for _ in range(STEPS):
            self.optimizer.zero_grad(set_to_none=set_to_none)
            for number in range(micro_batches):
                self.backward(reduced=number == micro_batches - 1, **how)
            self.optimizer.step()
        return self


Variant = Callable[[int, int], Trial]
VARIANTS: dict[str, Variant] = {}


def variant(function: Variant) -> Variant:
    VARIANTS[function.__name__] = function
    return function


@variant
def default(rank: int, world_size: int) -> Trial:
    return Trial(rank).train()


@variant
def zeroed(rank: int, world_size: int) -> Trial:
    return Trial(rank).train(set_to_none=False)


@variant
def never_cleared(rank: int, world_size: int) -> Trial:
    """Each backward adds to the mean of the one before."""
    trial = Trial(rank)
    for _ in range(STEPS):
        trial.backward()
        trial.optimizer.step()
    return trial


@variant
def static_graph(rank: int, world_size: int) -> Trial:
    return Trial(rank, static_graph=True).train()


@variant
def find_unused(rank: int, world_size: int) -> Trial:
    """One branch is used on all ranks but one, another on none."""
    return Trial(rank, Net(unused=True), find_unused_parameters=True).train(side=rank != 0)


@variant
def find_unused_accumulation(rank: int, world_size: int) -> Trial:
    """The branch is used by the first micro-batch only: DDP reduces what it had."""
    trial = Trial(rank, Net(unused=True), find_unused_parameters=True)
    for _ in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(reduced=False)
        trial.backward(side=rank != 0)
        trial.optimizer.step()
    return trial


@variant
def find_unused_bucket_view(rank: int, world_size: int) -> Trial:
    model = Net(unused=True)
    return Trial(rank, model, find_unused_parameters=True, gradient_as_bucket_view=True).train(side=rank != 0)


@variant
def find_unused_bucket_view_accumulation(rank: int, world_size: int) -> Trial:
    trial = Trial(rank, Net(unused=True), find_unused_parameters=True, gradient_as_bucket_view=True)
    for _ in range(STEPS):
        trial.optimizer.zero_grad()
        trial.backward(reduced=False)
        trial.backward(side=rank != 0)
        trial.optimizer.step()
    return trial


@variant
def bucket_view(rank: int, world_size: int) -> Trial:
    return Trial(rank, gradient_as_bucket_view=True).train()


@variant
def bucket_view_zeroed(rank: int, world_size: int) -> Trial:
    return Trial(rank, gradient_as_bucket_view=True).train(set_to_none=False)


@variant
def bucket_view_never_cleared(rank: int, world_size: int) -> Trial:
    trial = Trial(rank, gradient_as_bucket_view=True)
    for _ in range(STEPS):
        trial.backward()
        trial.optimizer.step()
    return trial


@variant
def bucket_view_static_graph(rank: int, world_size: int) -> Trial:
    return Trial(rank, gradient_as_bucket_view=True, static_graph=True).train()


@variant
def accumulation(rank: int, world_size: int) -> Trial:
    return Trial(rank).train(micro_batches=3)


@variant
def bucket_view_accumulation(rank: int, world_size: int) -> Trial:
    return Trial(rank, gradient_as_bucket_view=True).train(micro_batches=3)


@variant
def bucket_view_zeroed_accumulation(rank: int, world_size: int) -> Trial:
    return Trial(rank, gradient_as_bucket_view=True).train(set_to_none=False, micro_batches=2)


@variant
def checkpoint_reentrant(rank: int, world_size: int) -> Trial:
    return Trial(rank, Net(reentrant=True)).train()


@variant
def checkpoint_reentrant_static_graph(rank: int, world_size: int) -> Trial:
    return Trial(rank, Net(reentrant=True), static_graph=True).train()


@variant
def checkpoint_reentrant_bucket_view(rank: int, world_size: int) -> Trial:
    return Trial(rank, Net(reentrant=True), gradient_as_bucket_view=True).train()


@variant
def checkpoint_reentrant_accumulation(rank: int, world_size: int) -> Trial:
    return Trial(rank, Net(reentrant=True)).train(micro_batches=2)


@variant
def checkpoint_not_reentrant(rank: int, world_size: int) -> Trial:
    return Trial(rank, Net(reentrant=False)).train()


@variant
def batched_copy(rank: int, world_size: int) -> Trial:
    return Trial(rank, batched_grad_copy=True).train()


@variant
def batched_copy_bucket_view(rank: int, world_size: int) -> Trial:
    return Trial(rank, batched_grad_copy=True, gradient_as_bucket_view=True).train()


@variant
def fp16_hook(rank: int, world_size: int) -> Trial:
    trial = Trial(rank)
    trial.ddp.register_comm_hook(None, fp16_compress_hook)
    return trial.train()


@variant
def fp16_hook_bucket_view(rank: int, world_size: int) -> Trial:
    trial = Trial(rank, gradient_as_bucket_view=True)
    trial.ddp.register_comm_hook(None, fp16_compress_hook)
    return trial.train()


def averaging_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations as text
    """A communication hook of the program that also writes to the gradients, as one with an optimizer does."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    for parameter in bucket.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda each: each.value()[0])


@variant
def custom_hook(rank: int, world_size: int) -> Trial:
    trial = Trial(rank)
    trial.ddp.register_comm_hook(None, averaging_hook)
    return trial.train()


class NoStream:
    """torch asks for the stream of an accelerator even if there is none."""

    def wait_stream(self, other: Any) -> None:
        pass


def optimized_in_backward(rank: int, **options: Any) -> Trial:
    torch.accelerator.current_stream = NoStream  # type: ignore[assignment]
    model = Net()
    twin = copy.deepcopy(model)
    torch.distributed.optim._apply_optimizer_in_backward(
        torch.optim.SGD, [each for each in model.parameters() if each.requires_grad], {"lr": 0.1}
    )
    trial = Trial(rank, model, **options)
    # Without the optimizers of the parameters.
    trial.twin = twin
    for _ in range(STEPS):
        trial.backward()
    # The record of a backward is written at the next step or forward.
    trial.ddp(trial.inputs())
    return trial


@variant
def optimizer_in_backward(rank: int, world_size: int) -> Trial:
    return optimized_in_backward(rank)


@variant
def optimizer_in_backward_bucket_view(rank: int, world_size: int) -> Trial:
    return optimized_in_backward(rank, gradient_as_bucket_view=True)


def compiled() -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="eager")
    )
    return context


@variant
def compiled_autograd(rank: int, world_size: int) -> Trial:
    return Trial(rank).train(around=compiled)


@variant
def compiled_autograd_python_reducer(rank: int, world_size: int) -> Trial:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return Trial(rank).train(around=compiled)


@variant
def python_reducer(rank: int, world_size: int) -> Trial:
    """The reducer for compiled backwards, with one that is not compiled."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return Trial(rank).train()


def skipped(world_size: int) -> Iterator[tuple[str, str]]:
    """Variants that are not run, and why."""
    if world_size != 2:
        # The number of ranks makes no difference to the compiler.
        for name in ("compiled_autograd", "compiled_autograd_python_reducer"):
            yield name, "compiling takes seconds: only with two ranks"
    if "batched_grad_copy" not in inspect.signature(DDP.__init__).parameters:
        for name in ("batched_copy", "batched_copy_bucket_view"):
            yield name, "DDP has no option batched_grad_copy"


def rank_main(rank: int, world_size: int, names: list[str], out: Path) -> None:
    make_group(rank, world_size)
    skip = dict(skipped(world_size))
    results: list[dict[str, Any]] = []
    for name in names:
        result: dict[str, Any] = {"name": name, "module": Trial.wrapped, "expected": []}
        result["skipped"] = skip.get(name, "")
        if name not in skip:
            try:
                trial = VARIANTS[name](rank, world_size)
                forking.keep(trial)
                result["expected"] = trial.expected
            except Exception as error:
                traceback.print_exc()
                result["skipped"] = f"{type(error).__name__}: {error}"
        results.append(result)
    (out / f"{world_size}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="all")
    parser.add_argument("--world-sizes", default="2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--never-hold", action="store_true")
    options = parser.parse_args()
    if options.never_hold:
        from ddpcheck.agent.backward_tracker import BackwardTracker

        BackwardTracker._must_hold = lambda self: False  # type: ignore[method-assign]
    names = list(VARIANTS) if options.variants == "all" else options.variants.split(",")
    forking.prepare()
    for world_size in map(int, options.world_sizes.split(",")):
        ended = forking.run_ranks(rank_main, world_size, world_size, names, options.out)
        if not ended.ok:
            sys.exit(f"failed with {world_size} ranks: {ended}")


if __name__ == "__main__":
    main()

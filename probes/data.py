"""Records what each rank trains on: a fingerprint of every batch, samples drawn, random numbers used."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeGuard

import torch

from ddpcheck import torch_compat
from ddpcheck.device_api import devices_of, generators_of
from ddpcheck.probes.losses.graph import is_due
from ddpcheck.probes.losses.labels import LabelTracker
from ddpcheck.probes.probe import BudgetItem, Probe, ProbeContext
from ddpcheck.probes.samples.draws import MOST_EPOCHS, MOST_MAPS, LoaderRegistry, SampleDraws, TrackedLoader
from ddpcheck.probes.samples.fingerprint import (
    EMPTY_FINGERPRINT,
    BatchContents,
    Fingerprint,
    FingerprintFuture,
    fingerprint_batch,
)
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.modules import ModuleRole

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


# Labels that the loss ignores, by convention of torch and transformers.
IGNORED_LABEL = -100
# transformers passes it to losses that are normalised over all ranks: then no rank has a mean of its own.
SHARED_COUNT = "num_items_in_batch"
# A dataset is identified by its attributes only if they have at least this many distinct values.
MIN_VARIETY = 16
MAX_WRAPPED = 6
MAX_ATTRIBUTES = 64
MAX_COLUMNS = 8
MAX_NUMBERS = 1 << 12
MAX_PENDING = 64


RngStates = tuple[bytes, ...]


class PendingBatch(NamedTuple):
    """A batch whose record is incomplete: its fingerprint is pending, or its step has not run."""

    record: BatchRecord
    future: FingerprintFuture | None
    counted: tuple[str, ...]


class DataProbe(Probe):
    """Reads a bounded part of each batch; draws no random number and changes no order."""

    name = "data"
    budget_items: ClassVar[Mapping[str, BudgetItem]] = {
        "forward_inputs": BudgetItem.SKETCH,
        "root_forward": BudgetItem.SKETCH,
        "backward_called": BudgetItem.SKETCH,
        "before_step": BudgetItem.SKETCH,
        "after_step": BudgetItem.SKETCH,
    }

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._loaders = LoaderRegistry(context.world_size)
        # The pass from which the last batch was drawn since the last training forward.
        self._touched: SampleDraws | None = None
        self._open: PendingBatch | None = None
        self._before: tuple[int, RngStates] | None = None
        # A digest of what was drawn between that forward and its first backward; None: there was none yet.
        self._drew: str | None = None
        # The state of the generators after the last step.
        self._after: RngStates | None = None
        self._pending: deque[PendingBatch] = deque()
        # Loaders of steps outside of DDP whose descriptions were written.
        self._described: set[int] = set()
        self._labels = LabelTracker()
        # The devices of all modules, whose generators the job draws from.
        self._devices: dict[torch.device, None] = {}

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._devices.update(dict.fromkeys(devices_of(tracked.tensors(tracked.parameters))))
        self._after = rng_states(self._devices)

    def root_found(self, tracked: TrackedModule) -> None:
        self.after_wrap(tracked)

    def forward_inputs(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ddp = tracked.ddp()
        # Gradients are often enabled during evaluation, which may use the same data on every rank.
        if ddp is not None and not ddp.training:
            return
        self._feed(tracked)
        self._labels.forward(tracked.index, tracked.steps)
        self._close()
        after, self._after = self._after, None
        self._before = self._drew = None
        if not self.context.budget.runs(BudgetItem.SKETCH, tracked.steps):
            return
        now = rng_states(self._devices)
        self._before = (tracked.index, now)
        if tracked.forwards % self.context.config.every == 0:
            drew = rng_digest(after, now) if after is not None else ""
            self._open = _start_record(tracked, args, kwargs, drew)
        self._drain()

    root_forward = forward_inputs

    def backward_called(self, tensors: Any) -> None:
        """Random numbers that are drawn later do not enter local gradients: noise on reduced ones, choices for a log.

        Ranks may draw the same there, and often must.
        """
        if self._labels.due and not torch_compat.in_backward():
            self._labels.backward_called(tensors)
        if self._before is not None and self._drew is None:
            self._drew = rng_digest(self._before[1], rng_states(self._devices))

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        """Without a call of `backward`, as with torch.autograd.grad, draws up to here count."""
        if self._before is None:
            return
        index, before = self._before
        if any(tracked.index == index for tracked in (*optimizer.modules, *optimizer.roots)):
            drew = rng_digest(before, rng_states(self._devices)) if self._drew is None else self._drew
            self._before = self._drew = None
            if self._open is not None:
                self._open = self._open._replace(record=replace(self._open.record, drew=drew))

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        # Compared with the state at the next forward, if that is recorded.
        due = self.context.budget.runs_beside(BudgetItem.SKETCH, optimizer.steps + 1)
        self._after = rng_states(self._devices) if due else None
        self._close()
        self._drain()
        self._follow_labels(optimizer.steps)
        if self._touched is not None and all(
            tracked.role is ModuleRole.STEPPED for tracked in optimizer.modules
        ):
            self._describe_unwrapped()
        for loader in self._loaders.all:
            if loader.open and loader.open[0].over:
                self._write_passes(loader, keep=0)

    def _follow_labels(self, step: int) -> None:
        if self._labels.due:
            for record in self._labels.records():
                self.context.write(record)
        self._labels.due = is_due(step + 1)

    def _describe_unwrapped(self) -> None:
        """Without DDP no forward is observed: the batch drawn last is that of the step."""
        draws, self._touched = self._touched, None
        loader = None if draws is None else draws.loader
        if loader is None or loader.described is None or loader.described.replicas is None or loader.written:
            return
        if loader.ordinal not in self._described:
            self._described.add(loader.ordinal)
            self.context.write(loader.described)

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        begun = self._loaders.pass_of(iterator)
        if begun is None:
            return
        draws, first = begun
        if first:
            self._write_passes(draws.loader, keep=1)
            if draws.loader.described is None:
                iterable = draws.loader.iterable
                columns, members = (
                    ([], [])
                    if iterable
                    else _columns(torch_compat.read(torch_compat.DATASET, iterator), draws.loader.length)
                )
                mark = "" if iterable else _dataset_digest(iterator)
                draws.loader.describe(iterator, mark, columns, members)
        draws.add(index)
        self._touched = draws

    def batch_contents(self, iterator: Any, batch: Any) -> None:
        draws = self._loaders.draws(iterator)
        if draws is not None:
            draws.contents.received(batch)
            if self._labels.due:
                self._labels.returned(draws.loader.ordinal, batch)

    def sampler_exhausted(self, iterator: Any) -> None:
        draws = self._loaders.draws(iterator)
        if draws is not None:
            draws.exhausted = True

    def before_exit(self) -> None:
        self._close()
        self._drain(wait=True)
        for record in self._labels.records(wait=True):
            self.context.write(record)
        for loader in self._loaders.all:
            self._write_passes(loader, keep=0)

    def _feed(self, tracked: TrackedModule) -> None:
        """Assign the batch to the loader last drawn from, unless that was exhausted."""
        draws, self._touched = self._touched, None
        if draws is None:
            return
        draws.update_yielded()
        if not draws.over:
            if not draws.fed:
                draws.module, draws.step = tracked.index, tracked.steps
            draws.fed += 1

    def _close(self) -> None:
        if self._open is not None:
            self._pending.append(self._open)
            self._open = None

    def _drain(self, wait: bool = False) -> None:
        """Write complete records. Never waits in the training loop, and keeps a bounded number."""
        while self._pending:
            record, future, counted = self._pending[0]
            if future is not None and not (wait or future.ready()):
                if len(self._pending) > MAX_PENDING:
                    self._pending.popleft()
                return
            self._pending.popleft()
            fingerprint = future.fingerprint() if future is not None else EMPTY_FINGERPRINT
            counts = dict(zip(counted, fingerprint.counts, strict=False))
            parts = _parts(record, fingerprint)
            if fingerprint.digest or record.drew:
                self.context.write(
                    replace(
                        record,
                        digest=fingerprint.digest,
                        variety=min(64, fingerprint.variety),
                        tokens=counts.get("tokens", 0),
                        attended=counts.get("attended", 0),
                        drew_before=record.drew_before if parts else "",
                        parts=parts,
                    )
                )

    def _write_passes(self, loader: TrackedLoader, keep: int) -> None:
        """Write the finished passes over a loader, except the last `keep`."""
        done = loader.open[: len(loader.open) - keep]
        del loader.open[: len(done)]
        for draws in done:
            if not draws.fed or loader.written > MOST_EPOCHS:
                continue
            if not loader.written and loader.described is not None:
                self.context.write(loader.described)
            self.context.write(draws.record(with_map=loader.written < MOST_MAPS))
            samples = draws.contents.record(loader.ordinal, draws.number, draws.module or 0, draws.step)
            if samples is not None:
                self.context.write(samples)
            loader.written += 1


def _parts(record: BatchRecord, fingerprint: Fingerprint) -> list[str]:
    """Only if random numbers were drawn that may be part of one of several tensors."""
    wanted = record.drew_before and len(fingerprint.parts) > 1 and any(fingerprint.parts)
    return list(fingerprint.parts) if wanted else []


def _start_record(
    tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any], drew_before: str = ""
) -> PendingBatch:
    contents = BatchContents(args, kwargs)
    counted: dict[str, tuple[torch.Tensor, int]] = {}
    if SHARED_COUNT not in contents.named:
        for name, count, unless in (("labels", "tokens", IGNORED_LABEL), ("attention_mask", "attended", 0)):
            tensor = contents.named.get(name)
            if _per_token(tensor):
                counted[count] = (tensor, unless)
    step = None if tracked.steps == tracked.forwards else tracked.steps
    record = BatchRecord(tracked.forwards, tracked.index, step, rows=contents.rows(), drew_before=drew_before)
    return PendingBatch(record, fingerprint_batch(contents, list(counted.values())), tuple(counted))


def _per_token(labels: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def rng_states(devices: Iterable[torch.device] = ()) -> RngStates:
    """The states of torch's generators of the CPU and of `devices`: read, never advanced.

    A device's generator keeps its seed and offset on the host, so nothing waits for the device. A
    generator that was never used is not initialised.
    """
    read = [_state_bytes(torch.default_generator)]
    return (*read, *map(_state_bytes, generators_of(devices)))


def rng_digest(before: RngStates, after: RngStates) -> str:
    """A digest of the states from which random numbers were drawn in between; empty if none were.

    Ranks with the same digest drew the same numbers.
    """
    used = [then for then, now in zip(before, after, strict=False) if then != now]
    return hashlib.blake2b(b"".join(used), digest_size=6).hexdigest() if used else ""


def _state_bytes(generator: torch.Generator) -> bytes:
    with torch_compat.no_torch_function():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


def _dataset_digest(iterator: Any) -> str:
    """Identifies the dataset of this rank; empty if its attributes have too few values."""
    future = fingerprint_batch(BatchContents(*_attributes(torch_compat.read(torch_compat.DATASET, iterator))))
    if not future.ready():
        return ""
    fingerprint = future.fingerprint()
    return fingerprint.digest if fingerprint.variety >= MIN_VARIETY else ""


def _columns(dataset: Any, length: int) -> tuple[list[str], list[str]]:
    """Digests of the columns that identify each sample: they differ if ranks have different samples.

    And digests of the same entries in sorted order: equal if ranks have the same samples in another order.
    """
    digests: list[str] = []
    members: list[str] = []
    for column in _attributes(dataset)[:MAX_ATTRIBUTES]:
        names = _names(column, length)
        if names is not None and len(digests) < MAX_COLUMNS:
            future = fingerprint_batch(BatchContents(names))
            if future.ready() and (fingerprint := future.fingerprint()).variety >= MIN_VARIETY:
                digests.append(fingerprint.digest)
                # Of a longer list only a part was read, which is another one in another order.
                whole = repr(sorted(names)).encode("utf-8", "replace") if len(names) == length else b""
                members.append(hashlib.blake2b(whole, digest_size=6).hexdigest() if whole else "")
    return digests, members


def _names(column: Any, length: int) -> Any:
    """File names, keys, indices: distinct texts or integers. None for anything else.

    Values are not used: ranks may generate their own, as in many examples and benchmarks. Labels are not distinct.
    """
    if length < 0 or _rows_of(column) != length:
        return None
    # Only a part of it is read.
    sampled = column[:: -(-length // MAX_NUMBERS) or 1]
    sampled = sampled.tolist() if hasattr(sampled, "tolist") else sampled
    if not all(map(_is_name, sampled)) or len(set(sampled)) < len(sampled):
        return None
    # As memory, so that its variety is counted.
    return (
        array("q", sampled)
        if all(type(value) is int and abs(value) < 2**63 for value in sampled)
        else list(map(repr, sampled))
    )


def _is_name(value: Any) -> bool:
    """Tuples too: image folders keep a path and a class for each sample."""
    return type(value) in (int, str) or (
        type(value) is tuple and all(type(part) in (int, str) for part in value)
    )


def _rows_of(column: Any) -> int:
    """Of a plain list, or of a one-dimensional array on the host. Calls no code of the user."""
    if type(column) in (list, tuple, range, array):
        return len(column)
    if type(column) is torch.Tensor:
        is_list = column.is_cpu and column.layout is torch.strided and column.dim() == 1
        return column.shape[0] if is_list and not column.is_floating_point() else -1
    shape: tuple[int, ...] = getattr(column, "shape", ()) if type(column).__module__ == "numpy" else ()
    return int(shape[0]) if len(shape) == 1 else -1


def _attributes(dataset: Any) -> list[Any]:
    """Attributes of the dataset and of those it wraps: a subset is identified by its indices."""
    values: list[Any] = []
    for _ in range(MAX_WRAPPED):
        attributes = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict):
            return [*values, dataset]
        values += [value for name, value in list(attributes.items())[:MAX_ATTRIBUTES] if name != "dataset"]
        dataset = attributes.get("dataset")
    return values

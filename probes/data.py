"""Watches what each rank trains on: a fingerprint of every batch, samples drawn, random numbers used."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from array import array
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.batch_fingerprint import (
    EMPTY_FINGERPRINT,
    BatchContents,
    Fingerprint,
    FingerprintFuture,
    fingerprint_batch,
)
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.sample_draws import MOST_EPOCHS, MOST_MAPS, LoaderRegistry, SampleDraws, TrackedLoader
from ddpcheck.records.schema import BatchRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


States = tuple[bytes, ...]


def states() -> States:
    """How torch's own generators of this process stand: read, never advanced.

    A device's generator keeps its seed and offset on the host, so nothing waits for the device. One that was
    never used is not woken up.
    """
    found = [_bytes(torch.default_generator)]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        # While a graph is being captured its generator cannot be read.
        with contextlib.suppress(RuntimeError):
            found.append(_bytes(cuda.default_generators[cuda.current_device()]))
    return tuple(found)


def drawn_from(before: States, after: States) -> str:
    """A digest of the states from which numbers were drawn in between; empty where none were.

    Ranks that give the same one drew the same numbers.
    """
    used = [then for then, now in zip(before, after, strict=False) if then != now]
    return hashlib.blake2b(b"".join(used), digest_size=6).hexdigest() if used else ""


def _bytes(generator: torch.Generator) -> bytes:
    with torch_compat.no_torch_function():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())


# What the loss leaves out, by the convention of torch and of transformers.
IGNORED_LABEL = -100
# transformers passes it to losses that are normalised over all ranks: no rank has a mean of its own then.
SHARED_COUNT = "num_items_in_batch"
# The dataset's attributes must hold at least this many different values to tell it from another one.
TELLING = 16
MOST_WRAPPED = 6
MOST_ATTRIBUTES = 64
MOST_COLUMNS = 8
MOST_NUMBERS = 1 << 12
MOST_PENDING = 64


class PendingFingerprint(NamedTuple):
    """A batch whose record is not complete: its fingerprint is on its way, or its step has not come."""

    record: BatchRecord
    taken: FingerprintFuture | None
    counted: tuple[str, ...]


class DataProbe(Probe):
    """Reads a bounded part of each batch; draws no random number and changes no order."""

    name = "data"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._loaders = LoaderRegistry(context.world_size)
        # The pass that was last drawn from, since the last training forward.
        self._touched: SampleDraws | None = None
        self._open: PendingFingerprint | None = None
        self._before: tuple[int, States] | None = None
        # How the generators stood after the last step.
        self._after: States | None = None
        self._pending: deque[PendingFingerprint] = deque()

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._after = states()

    def forward_inputs(self, tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ddp = tracked.ddp()
        # Gradients are often left on during evaluation, which may rightly see the same data on every rank.
        if ddp is not None and not ddp.training:
            return
        self._feed(tracked)
        self._close()
        after, self._after = self._after, None
        now = states()
        self._before = (tracked.index, now)
        if tracked.forwards % self.context.config.every == 0:
            drew = drawn_from(after, now) if after is not None else ""
            self._open = _look(tracked, args, kwargs, drew)
        self._settle()

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._before is None:
            return
        index, before = self._before
        if any(tracked.index == index for tracked in optimizer.modules):
            self._before = None
            if self._open is not None:
                drew = drawn_from(before, states())
                self._open = self._open._replace(record=replace(self._open.record, drew=drew))

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._after = states()
        self._close()
        self._settle()
        for loader in self._loaders.all:
            if loader.open and loader.open[0].over:
                self._write_passes(loader, keep=0)

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        begun = self._loaders.begun(iterator)
        if begun is None:
            return
        draws, first = begun
        if first:
            self._write_passes(draws.loader, keep=1)
            if draws.loader.described is None:
                told = draws.loader.iterable
                columns = (
                    []
                    if told
                    else _columns(torch_compat.read(torch_compat.DATASET, iterator), draws.loader.length)
                )
                draws.loader.describe(iterator, "" if told else _mark(iterator), columns)
        draws.add(index)
        self._touched = draws

    def sampler_exhausted(self, iterator: Any) -> None:
        draws = self._loaders.draws(iterator)
        if draws is not None:
            draws.exhausted = True

    def before_exit(self) -> None:
        self._close()
        self._settle(wait=True)
        for loader in self._loaders.all:
            self._write_passes(loader, keep=0)

    def _feed(self, tracked: TrackedModule) -> None:
        """Whose batch is this? That of the loader last drawn from, unless it had come to its end."""
        draws, self._touched = self._touched, None
        if draws is None:
            return
        draws.see()
        if not draws.over:
            if not draws.fed:
                draws.module, draws.step = tracked.index, tracked.steps
            draws.fed += 1

    def _close(self) -> None:
        if self._open is not None:
            self._pending.append(self._open)
            self._open = None

    def _settle(self, wait: bool = False) -> None:
        """Write what has arrived. In the training loop nothing is waited for, and nothing piles up."""
        while self._pending:
            record, taken, counted = self._pending[0]
            if taken is not None and not (wait or taken.ready()):
                if len(self._pending) > MOST_PENDING:
                    self._pending.popleft()
                return
            self._pending.popleft()
            found = taken.fingerprint() if taken is not None else EMPTY_FINGERPRINT
            counts = dict(zip(counted, found.counts, strict=False))
            parts = _parts(record, found)
            if found.digest or record.drew:
                self.context.write(
                    replace(
                        record,
                        digest=found.digest,
                        variety=min(64, found.variety),
                        tokens=counts.get("tokens", 0),
                        attended=counts.get("attended", 0),
                        drew_before=record.drew_before if parts else "",
                        parts=parts,
                    )
                )

    def _write_passes(self, loader: TrackedLoader, keep: int) -> None:
        """Write the passes over a loader that are over, all but the last `keep`."""
        done = loader.open[: len(loader.open) - keep]
        del loader.open[: len(done)]
        for draws in done:
            if not draws.fed or loader.written > MOST_EPOCHS:
                continue
            if not loader.written and loader.described is not None:
                self.context.write(loader.described)
            self.context.write(draws.record(with_map=loader.written < MOST_MAPS))
            loader.written += 1


def _parts(record: BatchRecord, found: Fingerprint) -> list[str]:
    """Only where random numbers were drawn that may have gone into one of several tensors."""
    told = record.drew_before and len(found.parts) > 1 and any(found.parts)
    return list(found.parts) if told else []


def _look(
    tracked: TrackedModule, args: tuple[Any, ...], kwargs: dict[str, Any], drew_before: str = ""
) -> PendingFingerprint:
    contents = BatchContents(args, kwargs)
    counted: dict[str, tuple[torch.Tensor, int]] = {}
    if SHARED_COUNT not in contents.named:
        for name, count, unless in (("labels", "tokens", IGNORED_LABEL), ("attention_mask", "attended", 0)):
            tensor = contents.named.get(name)
            if _per_token(tensor):
                counted[count] = (tensor, unless)
    step = None if tracked.steps == tracked.forwards else tracked.steps
    record = BatchRecord(tracked.forwards, tracked.index, step, rows=contents.rows(), drew_before=drew_before)
    return PendingFingerprint(record, fingerprint_batch(contents, list(counted.values())), tuple(counted))


def _per_token(labels: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _mark(iterator: Any) -> str:
    """What tells this rank's dataset from that of another; empty where it holds too little to tell."""
    taken = fingerprint_batch(BatchContents(*_attributes(torch_compat.read(torch_compat.DATASET, iterator))))
    if not taken.ready():
        return ""
    found = taken.fingerprint()
    return found.digest if found.variety >= TELLING else ""


def _columns(dataset: Any, length: int) -> list[str]:
    """Digests of what names each sample: they differ where ranks hold other samples."""
    found: list[str] = []
    for column in _attributes(dataset)[:MOST_ATTRIBUTES]:
        names = _names(column, length)
        if names is not None and len(found) < MOST_COLUMNS:
            taken = fingerprint_batch(BatchContents(names))
            if taken.ready() and (told := taken.fingerprint()).variety >= TELLING:
                found.append(told.digest)
    return found


def _names(column: Any, length: int) -> Any:
    """File names, keys, indices: text or whole numbers of which no two are the same. None for anything else.

    Values may be made up by each rank for itself, as in many an example and benchmark, and labels come again and again.
    """
    if length < 0 or _rows_of(column) != length:
        return None
    # No more than a part of it is read.
    some = column[:: -(-length // MOST_NUMBERS) or 1]
    some = some.tolist() if hasattr(some, "tolist") else some
    if not all(map(_is_name, some)) or len(set(some)) < len(some):
        return None
    # As memory it tells how much it holds.
    return (
        array("q", some)
        if all(type(one) is int and abs(one) < 2**63 for one in some)
        else list(map(repr, some))
    )


def _is_name(value: Any) -> bool:
    """Image folders keep a path and a class for each sample."""
    return type(value) in (int, str) or (
        type(value) is tuple and all(type(part) in (int, str) for part in value)
    )


def _rows_of(column: Any) -> int:
    """Of a plain list, or of an array of one dimension on the host. Nothing is called that the user wrote."""
    if type(column) in (list, tuple, range, array):
        return len(column)
    if type(column) is torch.Tensor:
        is_list = column.is_cpu and column.layout is torch.strided and column.dim() == 1
        return column.shape[0] if is_list and not column.is_floating_point() else -1
    shape: tuple[int, ...] = getattr(column, "shape", ()) if type(column).__module__ == "numpy" else ()
    return int(shape[0]) if len(shape) == 1 else -1


def _attributes(dataset: Any) -> list[Any]:
    """Those of the dataset and of the ones it wraps: a share of one is told by its indices, whatever lies below."""
    found: list[Any] = []
    for _ in range(MOST_WRAPPED):
        held = getattr(dataset, "__dict__", None)
        if not isinstance(held, dict):
            return [*found, dataset]
        found += [value for name, value in list(held.items())[:MOST_ATTRIBUTES] if name != "dataset"]
        dataset = held.get("dataset")
    return found

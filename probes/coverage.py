"""Counts the parameters that optimizers step, and those that are not compared across ranks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ddpcheck import torch_compat
from ddpcheck.device_api import on_device
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.coverage import NotCompared, Parallelism, StepCoverageRecord, TrainingRecord
from ddpcheck.records.kinds.modules import ModuleRole

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.tracked_module import TrackedModule

# A program may make an optimizer for every epoch, from as many lines; and models in a loop.
MOST_ENTRIES = 256
MOST_IDS = 1 << 20
# Module and name of a class whose instances distribute parameters. Few programs import these modules.
_CLASSES = {
    ("torch.distributed.fsdp", "FSDPModule"): Parallelism.FSDP2,
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): Parallelism.FSDP,
    ("deepspeed", "DeepSpeedEngine"): Parallelism.DEEPSPEED,
    ("megatron.core.distributed", "DistributedDataParallel"): Parallelism.MEGATRON,
}
_DATA_PARALLEL = ("torch.nn", "DataParallel")


@dataclass
class CoverageEntry:
    """Optimizers of one class that step at one line. Parameters by id: several optimizers may step the same ones."""

    number: int
    name: str
    where: str
    steps: int = 0
    compared: set[int] = field(default_factory=set)
    not_compared: dict[NotCompared, set[int]] = field(default_factory=dict)

    def counts(self, compared_later: set[int]) -> dict[str, int]:
        """Parameters that were stepped first and wrapped afterwards are compared after wrapping."""
        counts = {
            reason.value: len(ids - compared_later if reason is NotCompared.NO_MODULE else ids)
            for reason, ids in self.not_compared.items()
        }
        return {reason: count for reason, count in counts.items() if count}


@dataclass
class CountedOptimizer:
    """An optimizer with the entry that its parameters were counted in, and its steps since."""

    signature: tuple[int, ...]
    entry: CoverageEntry
    steps: int = 0


class CoverageProbe(Probe):
    """Counts when the parameters of an optimizer or of a module change, and at powers of two; never at every step."""

    name = "coverage"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, CountedOptimizer] = WeakKeyDictionary()
        self._entries: dict[tuple[object, ...], CoverageEntry] = {}
        # Ids of all parameters that were compared at some time.
        self._compared: set[int] = set()
        # Parameters that were stepped before the first module was wrapped, by id.
        self._before_wrapping: dict[int, weakref.ref[torch.Tensor]] = {}
        self._backwards = 0
        # Whether the job has wrapped a module in DDP.
        self._wraps = False
        self._seen: list[str] | None = None
        self._written: dict[int, StepCoverageRecord] = {}

    def after_wrap(self, tracked: TrackedModule) -> None:
        if not self._compared:
            self._drop_temporary()
        self._wraps = self._wraps or tracked.role is ModuleRole.DDP
        self._note(tracked)

    def _drop_temporary(self) -> None:
        """Called after the first wrapping: what was trained before and no longer exists cannot differ any more."""
        gone = {key for key, parameter in self._before_wrapping.items() if parameter() is None}
        for entry in self._entries.values():
            for ids in entry.not_compared.values():
                ids -= gone
        self._before_wrapping.clear()

    def parameters_changed(self, tracked: TrackedModule, changes: list[Any]) -> None:
        self._note(tracked)

    def _note(self, tracked: TrackedModule) -> None:
        if len(self._compared) < MOST_IDS:
            self._compared.update(map(id, tracked.stepped_objects()))

    def unwrapped_backward(self) -> None:
        self._backwards += 1

    def optimizer_stepped(
        self, optimizer: torch.optim.Optimizer, signature: tuple[int, ...], modules: Sequence[TrackedModule]
    ) -> None:
        known = self._optimizers.get(optimizer)
        if known is None or known.signature != signature:
            known = self._count(optimizer, signature, modules, known)
        known.steps = steps = known.steps + 1
        entry = known.entry
        if steps > entry.steps:
            entry.steps = steps
        if steps & (steps - 1) == 0:
            # A parameter may have been unfrozen since, which changes no signature.
            if steps > 1:
                self._add(entry, optimizer, *self._split(optimizer, modules))
            self._write(entry)

    def before_exit(self) -> None:
        for entry in self._entries.values():
            self._write(entry)
        if self._backwards and not self._wraps and self._seen is None:
            self._seen = parallelism(())
        self.context.write(TrainingRecord(self._backwards, self._seen or []))

    def _count(
        self,
        optimizer: torch.optim.Optimizer,
        signature: tuple[int, ...],
        modules: Sequence[TrackedModule],
        known: CountedOptimizer | None,
    ) -> CountedOptimizer:
        compared, missing = self._split(optimizer, modules)
        name, where = type(optimizer).__name__, user_callsite()
        key = (name, where, bool(compared), *sorted(missing))
        entry = self._entries.get(key)
        if entry is None and len(self._entries) < MOST_ENTRIES:
            entry = self._entries[key] = CoverageEntry(len(self._entries), name, where)
        if entry is None:
            entry = next(reversed(self._entries.values()))
        if known is not None and known.entry is entry:
            known.signature = signature
        else:
            known = self._optimizers[optimizer] = CountedOptimizer(signature, entry)
        self._add(entry, optimizer, compared, missing)
        return known

    def _add(
        self,
        entry: CoverageEntry,
        optimizer: torch.optim.Optimizer,
        compared: set[int],
        missing: dict[NotCompared, set[int]],
    ) -> None:
        if len(entry.compared) < MOST_IDS:
            entry.compared |= compared
        if missing and not self._compared:
            for group in optimizer.param_groups:
                self._before_wrapping.update((id(p), weakref.ref(p)) for p in group["params"])
        for reason, ids in missing.items():
            known = entry.not_compared.setdefault(reason, set())
            if len(known) < MOST_IDS:
                known |= ids
        if self._seen is None and missing.keys() - {NotCompared.IGNORED, NotCompared.COPY}:
            self._seen = parallelism([p for group in optimizer.param_groups for p in group["params"]])
            self.context.write(TrainingRecord(self._backwards, self._seen))

    def _split(
        self, optimizer: torch.optim.Optimizer, modules: Sequence[TrackedModule]
    ) -> tuple[set[int], dict[NotCompared, set[int]]]:
        """Ids of the parameters that the optimizer steps: compared ones, and the others by reason."""
        in_modules = {id(tensor) for tracked in modules for tensor in tracked.stepped_objects()}
        sharded = {id(tensor) for tracked in modules for tensor in tracked.without_replica}
        copies = {id(tensor) for tracked in modules for tensor in tracked.copies}
        ignored = {id(tensor) for tracked in modules if tracked.ignored for tensor in _ignored(tracked)}
        compared: set[int] = set()
        missing: dict[NotCompared, set[int]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = id(parameter)
                if key in in_modules:
                    compared.add(key)
                elif key in copies:
                    missing.setdefault(NotCompared.COPY, set()).add(key)
                elif parameter.requires_grad:
                    reason = NotCompared.SHARDED if key in sharded else self._reason(parameter, ignored)
                    missing.setdefault(reason, set()).add(key)
        if NotCompared.COPY in missing:
            for tracked in modules:
                compared.update(id(tensor) for tensor in tracked.stepped_objects() if tracked.copies)
        return compared, missing

    def _reason(self, parameter: Any, ignored: set[int]) -> NotCompared:
        if id(parameter) in ignored:
            return NotCompared.IGNORED
        if is_dtensor(parameter):
            return NotCompared.DTENSOR
        if torch_compat.read(torch_compat.FLAT_PARAMETER, parameter, False):
            return NotCompared.FLAT_PARAMETER
        return NotCompared.WRAPPER_DELETED if id(parameter) in self._compared else NotCompared.NO_MODULE

    def _write(self, entry: CoverageEntry) -> None:
        record = StepCoverageRecord(
            entry=entry.number,
            name=entry.name,
            where=entry.where,
            steps=entry.steps,
            compared=len(entry.compared),
            not_compared=entry.counts(self._compared),
        )
        if self._written.get(entry.number) != record:
            self._written[entry.number] = record
            self.context.write(record)


def _ignored(tracked: TrackedModule) -> Iterable[torch.Tensor]:
    module = tracked.module()
    if module is None:
        return ()
    return (parameter for name, parameter in module.named_parameters() if name in tracked.ignored)


def is_dtensor(tensor: object) -> bool:
    """Without importing the module of DTensor: a program that has one has imported it."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def parallelism(parameters: Sequence[torch.Tensor]) -> list[str]:
    """What distributes parameters in this process, by the classes of its objects: nothing is imported for it."""
    classes = {kind: cls for name, kind in _CLASSES.items() if (cls := _imported(*name)) is not None}
    # torch always imports DataParallel, which has no effect on the CPU.
    if any(map(on_device, parameters)) and (data_parallel := _imported(*_DATA_PARALLEL)) is not None:
        classes[Parallelism.DATA_PARALLEL] = data_parallel
    # Going through all objects takes a tenth of a second: it is done once, and only where there may be one.
    present = set(map(type, gc.get_objects())) if classes else set()
    seen = {kind for kind, cls in classes.items() if any(cls in each.__mro__ for each in present)}
    if any(map(is_dtensor, parameters)):
        seen.add(Parallelism.DTENSOR)
    return sorted(kind.value for kind in seen)


def _imported(module: str, name: str) -> type | None:
    cls = getattr(sys.modules.get(module), name, None)
    return cls if isinstance(cls, type) else None

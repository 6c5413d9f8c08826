"""Records how much memory a rank holds, step by step, and what holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ddpcheck import torch_compat
from ddpcheck.device_api import api_of, devices_of, memory_on
from ddpcheck.probes.digest import plain_memory
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.os_counters import resident
from ddpcheck.records.kinds.memory import MemoryPartsRecord, MemoryRecord
from ddpcheck.records.kinds.modules import ModuleRole

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


# The first steps are all written; after them a change by this many bytes, and at least every n-th step.
FIRST = 16
CHANGE = 1 << 20
AT_LEAST_EVERY = 32
# After them, of steps that follow each other faster than this, only every n-th is measured. A limit by time alone
# leaves too few measurements of a short job to recognise growth.
SECONDS_BETWEEN = 0.02
STEPS_BETWEEN = 4
# A job with more steps has enough measurements: of its fast steps, fewer are measured.
MANY_STEPS = 256
MANY_STEPS_BETWEEN = 64
# Parts are measured rarely: state appears with the first step, and buckets are rebuilt in the second. It takes about
# six microseconds per parameter.
PARTS_AT = frozenset({1, 2, 16, 256, 4096, 65536})
_AROUND_PARTS = frozenset(step + offset for step in PARTS_AT for offset in (-1, 1))


class MemoryProbe(Probe):
    """Reads counters of the system and of torch's allocator; never waits for a device."""

    name = "memory"
    # Before the steps at which parts are measured.
    on_demand: ClassVar[frozenset[str]] = frozenset({"before_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._high = 0
        self._read_at = 0.0
        # The last step, the last measurement, and the last one that was written.
        self._step = -1
        self._measured = self._last = MemoryRecord(-1)
        self._base: dict[int, int] = {}
        # The devices of all modules, in the order of their wrapping. The current device may be another.
        self._devices: dict[torch.device, None] = {}
        self._kept: dict[int, int] = {}
        self._parts: dict[tuple[int, int], MemoryPartsRecord] = {}
        # The optimizer whose steps are counted: the first that stepped.
        self._counting: int | None = None

    def after_wrap(self, tracked: TrackedModule) -> None:
        """Memory before training: interpreter, libraries, data, and the first buckets of DDP."""
        tensors = [*tracked.tensors(tracked.parameters), *tracked.tensors(tracked.buffers)]
        devices = devices_of(tensors)
        self._devices.update(dict.fromkeys(devices))
        now = memory_on(devices).allocated if devices else resident().own
        buckets = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        # On the host a bucket takes no memory before it is written.
        self._base[tracked.index] = max(0, now - memory_of(tensors) - (buckets if devices else 0))

    def backward_begun(self, tracked: TrackedModule) -> None:
        """All activations are allocated: about the peak of a step."""
        if tracked.steps < FIRST or self._is_late():
            self._high = max(self._high, resident().own)
        first = tracked.backward is not None and not tracked.backward.window.synced
        if first and tracked.steps in PARTS_AT:
            self._kept[tracked.index] = gradient_bytes(tracked)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if optimizer.steps not in PARTS_AT:
            return
        for tracked in optimizer.modules:
            kept, base = self._kept.pop(tracked.index, 0), self._base.get(tracked.index, 0)
            parts = parts_of(tracked, optimizer, kept, base)
            key = (tracked.index, optimizer.index)
            if _sizes_of_parts(parts) != _sizes_of_parts(self._parts.get(key)):
                self._parts[key] = parts
                self.context.write(parts)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        step = optimizer.steps
        if step in _AROUND_PARTS:
            self._follow_parts(step)
        if self._counting is None:
            self._counting = optimizer.index
        if optimizer.index != self._counting or step % self.context.config.every:
            return
        self._step = step
        if not self._is_due(step):
            return
        self._read_at = monotonic()
        now = MemoryRecord(step, resident().own, self._high, *memory_on(self._devices))
        self._high = 0
        self._measured = now
        if self._is_written(now):
            self._last = now
            self.context.write(now)

    def _follow_parts(self, step: int) -> None:
        """Be called before the next step if it is one of those whose parts are measured."""
        if step + 1 in PARTS_AT:
            self.context.stop_calling(self, Probe.before_step)
            self.context.call(self, Probe.before_step)
        elif step - 1 in PARTS_AT and step not in PARTS_AT:
            # Not directly after the step: another optimizer may follow in the same iteration.
            self.context.stop_calling(self, Probe.before_step)

    def before_exit(self) -> None:
        """The last measurement is also that of the steps after it."""
        if self._measured.step >= 0 and self._step > self._last.step:
            self.context.write(replace(self._measured, step=self._step))

    def _is_due(self, step: int) -> bool:
        """Reading the counters takes ten microseconds: steps of a millisecond are not all read."""
        between = STEPS_BETWEEN if step < MANY_STEPS else MANY_STEPS_BETWEEN
        return step < FIRST or step % between == 0 or self._is_late()

    def _is_late(self) -> bool:
        return monotonic() - self._read_at > SECONDS_BETWEEN

    def _is_written(self, now: MemoryRecord) -> bool:
        last = self._last
        return (
            now.step < FIRST
            or now.step - last.step >= AT_LEAST_EVERY
            or abs(now.host - last.host) >= CHANGE
            or abs(now.high - last.high) >= CHANGE
            or now.allocated != last.allocated
            or now.peak != last.peak
        )


def _sizes_of_parts(parts: MemoryPartsRecord | None) -> tuple[object, ...]:
    if parts is None:
        return ()
    return (parts.parameters, parts.buffers, parts.gradients, parts.buckets, parts.state, parts.kept)


def parts_of(tracked: TrackedModule, optimizer: TrackedOptimizer, kept: int, base: int) -> MemoryPartsRecord:
    """Taken between backward and step, when everything except the activations is allocated."""
    parameters = tracked.tensors(tracked.parameters)
    gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
    buckets = _reduced_bytes(tracked, parameters) if tracked.role is ModuleRole.DDP else 0
    views = tracked.options.get("gradient_as_bucket_view") is True
    device = parameters[0].device if parameters else torch.device("cpu")
    api = api_of(device)
    return MemoryPartsRecord(
        module=tracked.index,
        optimizer=optimizer.index,
        step=optimizer.steps,
        device=str(device),
        parameters=memory_of(parameters),
        buffers=memory_of(tracked.tensors(tracked.buffers)),
        # A view keeps the whole bucket alive: only gradients unknown to the reducer are outside of it.
        gradients=max(0, _sum_of_sizes(gradients) - buckets) if views else memory_of(gradients),
        buckets=buckets,
        views=views,
        state=memory_of(_state(optimizer, parameters)),
        kept=0 if views else kept,
        base=base,
        elsewhere=api.memory_elsewhere(device) if api is not None else {},
    )


def gradient_bytes(tracked: TrackedModule) -> int:
    """Bytes of the current gradients."""
    return memory_of(tensor.grad for tensor in tracked.tensors(tracked.parameters) if tensor.grad is not None)


def memory_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory of `tensors`; shared storage counts once."""
    storages: dict[int, int] = {}
    rest = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            rest += _sparse(tensor)
            continue
        memory = tensor if type(tensor) in PLAIN_TYPES else plain_memory(tensor)
        if memory is None:
            rest += tensor.nbytes  # a wrapper: its inner tensors are unknown
            continue
        storage = memory.untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return rest + sum(storages.values())


def _sparse(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return sum(int(part.nbytes) for part in torch_compat.sparse_parts(tensor) or ())
    return 0


def _sum_of_sizes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _reduced_bytes(tracked: TrackedModule, parameters: list[torch.Tensor]) -> int:
    """DDP's buckets are flat copies of the gradients it reduces, without gaps."""
    indices = tracked.backward.reducer_indices if tracked.backward is not None else range(len(parameters))
    reduced = [parameters[index] for index in indices if index < len(parameters)]
    return sum(tensor.nbytes for tensor in reduced if tensor.requires_grad)


def _state(optimizer: TrackedOptimizer, parameters: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    torch_optimizer: Any = optimizer.ref()
    # ZeRO steps an inner optimizer, which holds this rank's share of the state.
    inner = getattr(torch_optimizer, "optim", torch_optimizer)
    state = getattr(inner, "state", {})
    for parameter in parameters:
        for value in (state.get(parameter) or {}).values():
            if isinstance(value, torch.Tensor):
                yield value

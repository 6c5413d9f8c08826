"""Watches how much memory a rank holds, step by step, and what holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.probes.memory_parts import gradient_bytes, held, parts_of
from ddpcheck.probes.probe import Probe, Scene
from ddpcheck.probes.process.device_memory import DeviceMemory, awake, device_memory
from ddpcheck.probes.process.os_counters import resident
from ddpcheck.records.schema import MemoryPartsRecord, MemoryRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import WatchedModule
    from ddpcheck.agent.tracked_optimizer import WatchedOptimizer

# Every one of the first steps is written; later a change by this much, and else every so manieth.
FIRST = 16
CHANGE = 1 << 20
AT_LEAST_EVERY = 32
# The parts are looked at seldom: state comes with the first step, buckets are rebuilt in the second. A look takes
# about six microseconds for each parameter.
PARTS_AT = frozenset({1, 2, 16, 256, 4096, 65536})


class MemoryProbe(Probe):
    """Reads counters of the system and of torch's allocator; no device is ever waited for."""

    name = "memory"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._high = 0
        self._last = MemoryRecord(-1)
        self._base: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._parts: dict[tuple[int, int], MemoryPartsRecord] = {}
        # The optimizer whose steps count; of several, the first that stepped.
        self._counting: int | None = None

    def wrapped(self, watched: WatchedModule) -> None:
        """What was there before the job took shape: interpreter, libraries, data, and DDP's first buckets."""
        tensors = [*watched.tensors(watched.parameters), *watched.tensors(watched.buffers)]
        on_device = any(tensor.is_cuda for tensor in tensors)
        now = device_memory().allocated if on_device else resident().own
        buckets = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        # On the host a bucket is no memory before it is written to.
        self._base[watched.index] = max(0, now - held(tensors) - (buckets if on_device else 0))

    def backward_begun(self, watched: WatchedModule) -> None:
        """Activations are all there: about the most that a step holds."""
        self._high = max(self._high, resident().own)
        first = watched.backward is not None and not watched.backward.window.synced
        if first and watched.steps in PARTS_AT:
            self._kept[watched.index] = gradient_bytes(watched)

    def before_step(self, optimizer: WatchedOptimizer) -> None:
        if optimizer.steps not in PARTS_AT:
            return
        for watched in optimizer.modules:
            kept, base = self._kept.pop(watched.index, 0), self._base.get(watched.index, 0)
            parts = parts_of(watched, optimizer, kept, base)
            place = (watched.index, optimizer.index)
            if _figures(parts) != _figures(self._parts.get(place)):
                self._parts[place] = parts
                self.scene.write(parts)

    def after_step(self, optimizer: WatchedOptimizer) -> None:
        if self._counting is None:
            self._counting = optimizer.index
        if optimizer.index != self._counting or optimizer.steps % self.scene.config.every:
            return
        device = device_memory() if awake() else DeviceMemory()
        now = MemoryRecord(optimizer.steps, resident().own, self._high, *device)
        self._high = 0
        if self._tells(now):
            self._last = now
            self.scene.write(now)

    def _tells(self, now: MemoryRecord) -> bool:
        last = self._last
        return (
            now.step < FIRST
            or now.step - last.step >= AT_LEAST_EVERY
            or abs(now.host - last.host) >= CHANGE
            or abs(now.high - last.high) >= CHANGE
            or now.allocated != last.allocated
            or now.peak != last.peak
        )


def _figures(parts: MemoryPartsRecord | None) -> tuple[object, ...]:
    if parts is None:
        return ()
    return (parts.parameters, parts.buffers, parts.gradients, parts.buckets, parts.state, parts.kept)

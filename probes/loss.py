"""Records the loss of each step: the scalars on which backward was called, read without waiting for a device."""

from __future__ import annotations

import ctypes
import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpcheck import torch_compat
from ddpcheck.device_api import on_device
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.modules import LossRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


# One record for this many steps, and at least this often.
STEPS_PER_RECORD = 16
NS_PER_RECORD = 1_000_000_000
# Steps whose scalars may be pending on a device; if it is further behind, the oldest are dropped.
MAX_PENDING = 64

# Types of C with the bits of these dtypes.
_C_TYPES = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}


class LossProbe(Probe):
    """Reads the roots of the outermost backwards between two steps."""

    name = "loss"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._scalars: list[Scalar | None] = []
        self._pending: deque[StepLoss] = deque()
        self._rows: list[tuple[int, int, float | None]] = []
        self._written = perf_counter_ns()

    def backward_called(self, root: Any = None) -> None:
        # Bounds the list in a job that calls backward and never steps.
        if not torch_compat.in_backward() and len(self._scalars) < 1 << 16:
            self._scalars.append(read_scalar(root))

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        scalars, self._scalars = self._scalars, []
        if not scalars:
            return
        scale = optimizer.scale if optimizer.scaled else 1.0
        first = scalars[0]
        if len(scalars) == 1 and type(first) is KnownScalar and scale == 1.0 and not self._pending:
            # As in most jobs.
            self._rows.append((optimizer.index, optimizer.steps, first.number))
        elif not self._pending and _READ.issuperset(map(type, scalars)):
            self._rows.append((optimizer.index, optimizer.steps, _loss_of(scalars, scale)))
        else:
            self._pending.append(StepLoss(optimizer.index, optimizer.steps, scalars, scale))
            self._drain()
        if len(self._rows) >= STEPS_PER_RECORD or perf_counter_ns() - self._written > NS_PER_RECORD:
            self._write()

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        self._scalars = []

    def before_exit(self) -> None:
        self._drain()
        self._pending.clear()
        self._write()

    def _drain(self) -> None:
        """Process scalars that have arrived from the device; never waits."""
        while self._pending and (self._pending[0].ready() or len(self._pending) > MAX_PENDING):
            step = self._pending.popleft()
            self._rows.append((step.optimizer, step.number, step.value() if step.ready() else None))

    def _write(self) -> None:
        self._written = perf_counter_ns()
        rows, self._rows = self._rows, []
        for optimizer in dict.fromkeys(row[0] for row in rows):
            own = [(number, value) for index, number, value in rows if index == optimizer]
            while own:
                # The steps of one record are consecutive.
                first = own[0][0]
                length = next((n for n, (number, _) in enumerate(own) if number != first + n), len(own))
                values = [value for _, value in own[:length]]
                self.context.write_later(partial(_record_of, optimizer, first, values))
                own = own[length:]


def _record_of(optimizer: int, first: int, values: list[float | None]) -> LossRecord:
    return LossRecord(optimizer, first, [_as_json(value) for value in values])


@dataclass(frozen=True)
class StepLoss:
    """One optimizer step and the scalars differentiated for it. None: a root that is not a scalar."""

    optimizer: int
    number: int
    scalars: Sequence[Scalar | None]
    # The factor of GradScaler in the loss; None if it is unknown.
    scale: float | None

    def ready(self) -> bool:
        return all(scalar is None or scalar.ready() for scalar in self.scalars)

    def value(self) -> float | None:
        return _loss_of(self.scalars, self.scale)


def _loss_of(scalars: Sequence[Scalar | None], scale: float | None) -> float | None:
    values = [scalar.value() for scalar in scalars if scalar is not None]
    if not values or len(values) < len(scalars) or not scale:
        return None
    # Gradients accumulate over backwards, so the loss that they belong to is the sum.
    return sum(values) / scale


def _as_json(value: float | None) -> float | str | None:
    """Nine digits identify every float32; JSON has no literal for non-finite numbers."""
    if value is None:
        return None
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


class Scalar(Protocol):
    """A number that may still be on a device."""

    def ready(self) -> bool: ...

    def value(self) -> float: ...


class KnownScalar:
    """A number that was read from host memory."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number

    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self.number


# Nothing of these is pending on a device.
_READ = frozenset({KnownScalar, type(None)})


class PendingScalar:
    """A number that is being copied from a device. Not yet run on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from ddpcheck.probes.digest.device_copy import copy_to_host

        self._copy = copy_to_host(tensor.detach().to(torch.float64, copy=True).view(1, 1))

    def ready(self) -> bool:
        return self._copy.ready()

    def value(self) -> float:
        return float(self._copy.rows()[0][0])


def read_scalar(root: Any) -> Scalar | None:
    """None for anything but one real floating-point number in plain memory."""
    # Subclasses may run the user's code when their values are read.
    if type(root) is not torch.Tensor or root.numel() != 1 or root.layout != torch.strided:
        return None
    if root.is_cpu:
        return _on_host(root)
    if on_device(root) and root.is_floating_point():
        return PendingScalar(root)
    return None


def _on_host(root: torch.Tensor) -> KnownScalar | None:
    # A lazy negation of torch leaves other bits in memory.
    if root.is_neg():
        return None
    dtype, address = root.dtype, root.data_ptr()
    if not address:
        return None  # its memory was freed
    c_type = _C_TYPES.get(dtype)
    if c_type is not None:
        return KnownScalar(c_type.from_address(address).value)
    if dtype == torch.bfloat16:
        return KnownScalar(struct.unpack("<f", b"\0\0" + ctypes.string_at(address, 2))[0])
    if dtype == torch.float16:
        return KnownScalar(struct.unpack("=e", ctypes.string_at(address, 2))[0])
    return None

"""The loss of each step: the scalars that backward was called on, read without holding anybody up."""

from __future__ import annotations

import ctypes
import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.optimizers import LossRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


_LETTERS = {torch.float64: "d", torch.float32: "f", torch.float16: "e"}


class Scalar(Protocol):
    """A number that may still be on its way."""

    def ready(self) -> bool: ...

    def value(self) -> float: ...


class KnownScalar:
    """A number that lay in the host's memory."""

    def __init__(self, value: float) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self._value


class PendingScalar:
    """A number that a device sends. Not run on a GPU so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from ddpcheck.probes.digest.device_copy import copy_to_host

        self._copy = copy_to_host(tensor.detach().to(torch.float64, copy=True).view(1, 1))

    def ready(self) -> bool:
        return self._copy.ready()

    def value(self) -> float:
        return float(self._copy.rows()[0][0])


def read_scalar(root: Any) -> Scalar | None:
    """None for anything but one real floating-point number in plain memory."""
    # Subclasses may do anything when asked for their values.
    if type(root) is not torch.Tensor or root.numel() != 1 or root.layout != torch.strided:
        return None
    if root.is_cpu:
        return _on_host(root)
    if root.is_cuda and root.is_floating_point() and not torch.cuda.is_current_stream_capturing():
        return PendingScalar(root)
    return None


def _on_host(root: torch.Tensor) -> KnownScalar | None:
    # A negation that torch has put off leaves other bits in memory.
    if root.is_neg():
        return None
    if root.dtype == torch.bfloat16:
        return KnownScalar(struct.unpack("<f", b"\0\0" + ctypes.string_at(root.data_ptr(), 2))[0])
    letter = _LETTERS.get(root.dtype)
    if letter is None:
        return None
    return KnownScalar(struct.unpack(f"={letter}", ctypes.string_at(root.data_ptr(), root.element_size()))[0])


# A line is written for so many steps, and at least this often.
ROWS_A_RECORD = 16
SECONDS_A_RECORD = 1.0
# Steps whose scalars may be on their way from a device; of one that is further behind the oldest are given up.
MOST_PENDING = 64


@dataclass(frozen=True)
class Step:
    """One optimizer step, and what was differentiated for it. None: something that is no scalar."""

    optimizer: int
    number: int
    scalars: Sequence[Scalar | None]
    # By which GradScaler had multiplied the loss; None where it cannot be told.
    scale: float | None

    def ready(self) -> bool:
        return all(scalar is None or scalar.ready() for scalar in self.scalars)

    def value(self) -> float | None:
        values = [scalar.value() for scalar in self.scalars if scalar is not None]
        if not values or len(values) < len(self.scalars) or not self.scale:
            return None
        # Gradients add up from one backward to the next: what they are the derivative of adds up likewise.
        return sum(values) / self.scale


class LossProbe(Probe):
    """Looks at the outermost backwards between two steps."""

    name = "loss"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._depth = 0
        self._scalars: list[Scalar | None] = []
        self._pending: deque[Step] = deque()
        self._rows: list[tuple[int, int, float | None]] = []
        self._written = perf_counter_ns()

    def before_forward(self, tracked: TrackedModule) -> None:
        # A backward that raised never returned.
        self._depth = 0

    def backward_called(self, root: Any = None) -> None:
        self._depth += 1
        # Nobody steps in a job that only ever calls backward: what cannot be a step's is not kept.
        if self._depth == 1 and len(self._scalars) < 1 << 16:
            self._scalars.append(read_scalar(root))

    def backward_returned(self) -> None:
        self._depth = max(0, self._depth - 1)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._depth = 0
        scalars, self._scalars = self._scalars, []
        if scalars:
            scale = optimizer.scale if optimizer.scaled else 1.0
            self._pending.append(Step(optimizer.index, optimizer.steps, scalars, scale))

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._settle()
        full = len(self._rows) >= ROWS_A_RECORD
        if full or perf_counter_ns() - self._written > SECONDS_A_RECORD * 1e9:
            self._write()

    def step_skipped(self, optimizer: TrackedOptimizer) -> None:
        self._scalars = []

    def before_exit(self) -> None:
        self._settle()
        self._pending.clear()
        self._write()

    def _settle(self) -> None:
        """Take what has come from the device; nothing is waited for."""
        while self._pending and (self._pending[0].ready() or len(self._pending) > MOST_PENDING):
            step = self._pending.popleft()
            self._rows.append((step.optimizer, step.number, step.value() if step.ready() else None))

    def _write(self) -> None:
        self._written = perf_counter_ns()
        rows, self._rows = self._rows, []
        for optimizer in dict.fromkeys(row[0] for row in rows):
            mine = [(number, value) for of, number, value in rows if of == optimizer]
            while mine:
                # Steps of one record follow each other.
                first = mine[0][0]
                length = next((n for n, (number, _) in enumerate(mine) if number != first + n), len(mine))
                values = [_written(value) for _, value in mine[:length]]
                self.context.write(LossRecord(optimizer, first, values))
                mine = mine[length:]


def _written(value: float | None) -> float | str | None:
    """Nine digits tell every number of 32 bits; JSON has no word for what is not finite."""
    if value is None:
        return None
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)

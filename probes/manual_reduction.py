"""Sketches gradients that the job reduces itself: as the last backward left them, and as the optimizer applies them."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ddpcheck import torch_compat
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.scan.scanner import Scan, TensorScanner, sketch_text
from ddpcheck.records.kinds.gradients import ManualReductionRecord
from ddpcheck.records.kinds.modules import ModuleRole

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# The code that reduces gradients is the same at every step: a few steps show what it does.
SKETCHED_STEPS = 8
# Losses whose field `reduction` is 1 are means over the batch.
_MEAN = 1
_MAX_TERMS = 8


class PendingReduction(NamedTuple):
    """Sketches that may still be computed on a device."""

    module: int
    optimizer: int
    step: int
    local: Scan
    applied: Scan
    own_mean: bool
    backwards: int


class ManualReductionProbe(Probe):
    """Only for gradients that DDP does not reduce, and only in the first steps."""

    name = "manual_reduction"
    on_demand: ClassVar[frozenset[str]] = frozenset({"backward_called", "before_step", "before_side_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._scanners: dict[int, TensorScanner] = {}
        self._local: dict[int, Scan] = {}
        self._pending: deque[PendingReduction] = deque()
        # DDP modules that reduced a gradient in some step: accumulation, not a reduction by hand.
        self._reduced_by_ddp: set[int] = set()
        # What the loss is of the mean over the rank's own batch; None: it is something else.
        self._scale: float | None = None
        self._called = False

    def unwrapped_found(self, tracked: TrackedModule) -> None:
        if tracked.role is ModuleRole.STEPPED:
            self._call()
            self._scanners[tracked.index] = TensorScanner()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self.context.call(self, Probe.backward_called, Probe.before_step, Probe.before_side_step)

    def wrapper_released(self, tracked: TrackedModule) -> None:
        self._scanners.pop(tracked.index, None)
        self._local.pop(tracked.index, None)

    def backward_called(self, root: Any) -> None:
        if self._scanners:
            self._scale = _scale_of_mean(getattr(root, "grad_fn", None))

    def unreduced_gradients(self, tracked: TrackedModule) -> None:
        self._sketch(tracked)

    def unsynced_gradients_ready(self, tracked: TrackedModule) -> None:
        """A DDP module inside `no_sync`, or bypassed: the job may reduce its gradients by hand before the step."""
        if (
            tracked.role is not ModuleRole.DDP
            or tracked.index in self._reduced_by_ddp
            or not tracked.group[1:]
        ):
            return
        if tracked.index in self._scanners:
            self._sketch(tracked)
        elif tracked.steps < SKETCHED_STEPS:
            # From the next backward on: the loss of this one was not seen.
            self._call()
            self._scanners[tracked.index] = TensorScanner()

    def _sketch(self, tracked: TrackedModule) -> None:
        scanner = self._scanners.get(tracked.index)
        if scanner is not None and tracked.steps < SKETCHED_STEPS:
            if tracked.backward is not None and tracked.backward.program_has_hooks:
                # They may have scaled the gradients, and begun to reduce them.
                self._scale = None
            gradients = tracked.gradients()
            scanner.update(gradients)
            self._local[tracked.index] = scanner.scan(gradients, sketch=b"\1" * len(gradients))

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._drain()
        if not self._local:
            return
        for tracked in optimizer.modules:
            local = self._local.pop(tracked.index, None)
            if local is None:
                continue
            window = None if tracked.backward is None else tracked.backward.window
            if tracked.role is ModuleRole.DDP and window is not None and window.synced:
                self._reduced_by_ddp.add(tracked.index)
                self._scanners.pop(tracked.index, None)
                continue
            backwards = 1 if window is None else max(window.unsynced, 1)
            gradients, scanner = tracked.gradients(), self._scanners[tracked.index]
            scanner.update(gradients)
            applied = scanner.scan(gradients, sketch=b"\1" * len(gradients))
            self._pending.append(
                PendingReduction(
                    tracked.index,
                    optimizer.index,
                    optimizer.steps,
                    local,
                    applied,
                    _is_own_mean(self._scale, backwards, len(tracked.group)),
                    backwards,
                )
            )
            self._drain()

    before_side_step = before_step

    def before_exit(self) -> None:
        self._drain(wait=True)

    def _drain(self, wait: bool = False) -> None:
        """Write the sketches that have arrived from a device; never waits in the training loop."""
        while self._pending:
            first = self._pending[0]
            if not (wait or (first.local.ready() and first.applied.ready())):
                return
            self._pending.popleft()
            self.context.write(
                ManualReductionRecord(
                    module=first.module,
                    optimizer=first.optimizer,
                    step=first.step,
                    local=sketch_text(first.local.numbers()),
                    applied=sketch_text(first.applied.numbers()),
                    absent=sorted(first.applied.absent),
                    own_mean=first.own_mean,
                    backwards=first.backwards,
                )
            )


def _is_own_mean(scale: float | None, backwards: int, ranks: int) -> bool:
    """Whether nothing scales the loss but, perhaps, the number of backwards before the step.

    If that is also the number of ranks, the job may mean either.
    """
    if scale is None:
        return False
    return scale == 1.0 or (backwards != ranks and math.isclose(scale * backwards, 1.0, rel_tol=1e-6))


def _scale_of_mean(node: Any, terms: int = _MAX_TERMS) -> float | None:
    """What the loss is of a mean over the rank's own batch, or of a sum of such means; None if it is something else."""
    if node is None or terms <= 0:
        return None
    name = type(node).__name__
    if name.startswith("AddBackward"):
        scales = {_scale_of_mean(term, terms // 2) for term, _ in node.next_functions}
        return scales.pop() if len(scales) == 1 else None
    if name.startswith(("DivBackward", "MulBackward")):
        factor, inner = _factor(node), _scale_of_mean(node.next_functions[0][0], terms - 1)
        if factor is None or inner is None:
            return None
        return inner / factor if name.startswith("Div") else inner * factor
    is_mean = name.startswith("MeanBackward") or torch_compat.read(torch_compat.LOSS_REDUCTION, node) == _MEAN
    return 1.0 if is_mean else None


def _factor(node: Any) -> float | None:
    """The number by which the loss is multiplied or divided. A value on a device would have to be waited for."""
    other = torch_compat.read(torch_compat.LOSS_FACTOR, node)
    if other is None or not other.is_cpu or other.dim() or other.requires_grad:
        return None
    value = float(other)
    return value if math.isfinite(value) and value != 0.0 else None

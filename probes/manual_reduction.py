"""Sketches gradients that the job reduces itself: as the last backward left them, and as the optimizer applies them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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


class ManualReductionProbe(Probe):
    """Only for parameters outside of DDP, and only in the first steps."""

    name = "manual_reduction"
    on_demand: ClassVar[frozenset[str]] = frozenset({"backward_called", "before_step", "before_side_step"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._scanners: dict[int, TensorScanner] = {}
        self._local: dict[int, Scan] = {}
        self._pending: deque[PendingReduction] = deque()
        self._own_mean = False
        self._called = False

    def unwrapped_found(self, tracked: TrackedModule) -> None:
        if tracked.role is ModuleRole.STEPPED:
            if not self._called:
                self._called = True
                self.context.call(self, Probe.backward_called, Probe.before_step, Probe.before_side_step)
            self._scanners[tracked.index] = TensorScanner()

    def wrapper_released(self, tracked: TrackedModule) -> None:
        self._scanners.pop(tracked.index, None)
        self._local.pop(tracked.index, None)

    def backward_called(self, root: Any) -> None:
        if self._scanners:
            self._own_mean = _is_own_mean(getattr(root, "grad_fn", None))

    def unreduced_gradients(self, tracked: TrackedModule) -> None:
        scanner = self._scanners.get(tracked.index)
        if scanner is not None and tracked.steps < SKETCHED_STEPS:
            if tracked.backward is not None and tracked.backward.program_has_hooks:
                # They may have scaled the gradients, and begun to reduce them.
                self._own_mean = False
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
            gradients, scanner = tracked.gradients(), self._scanners[tracked.index]
            scanner.update(gradients)
            applied = scanner.scan(gradients, sketch=b"\1" * len(gradients))
            self._pending.append(
                PendingReduction(
                    tracked.index, optimizer.index, optimizer.steps, local, applied, self._own_mean
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
                )
            )


def _is_own_mean(node: Any, terms: int = _MAX_TERMS) -> bool:
    """Whether the loss is a mean over the rank's own batch, or a sum of such means, that nothing scales."""
    if node is None or terms <= 0:
        return False
    name = type(node).__name__
    if name.startswith("AddBackward"):
        return all(_is_own_mean(term, terms // 2) for term, _ in node.next_functions)
    return name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN

"""Records whether the first backward of a step starts from cleared gradients or from those of the step before."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.tensor_bytes import direct_span
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.kinds.state import GradientStart, GradientStartRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Parameters that are read, evenly spread: gradients are cleared for all parameters of an optimizer or for none.
MOST_SAMPLES = 4
# Bytes of a gradient that are read to see whether it is zero.
_SAMPLE_BYTES = 64
# Bounds the records of a job that clears its gradients now and then.
MOST_RECORDS = 256


class GradientIdentities(NamedTuple):
    """Objects and versions of some gradients, 0 for those that do not exist; no versions: none exists."""

    objects: list[int]
    versions: list[int]


_NO_GRADIENTS = GradientIdentities([], [])


class TrackedGradients:
    """Samples of the gradients of one module."""

    def __init__(self, tracked: TrackedModule) -> None:
        self._tracked = tracked
        # The sampled parameters, and by optimizer what they were chosen for.
        self.indices: list[int] = []
        self.signatures: dict[int, tuple[int, ...]] = {}
        # Of each gradient after the last step; None: not known, or a backward has begun since.
        self.after_step: GradientIdentities | None = None
        self.found = GradientStart.CLEARED
        self.where = ""
        self.written = GradientStart.CLEARED
        self.records = 0

    def current(self) -> list[torch.Tensor | None]:
        # The slots are those of the module: when it is deleted, nothing here keeps its tensors.
        slots = self._tracked.parameters
        try:
            return [slots[index].holder[slots[index].key].grad for index in self.indices]
        except (IndexError, KeyError, AttributeError):
            # The program took a parameter out of its module.
            return [None] * len(self.indices)


class GradientStartProbe(Probe):
    """A gradient that is the same object with the same version as after the last step was not cleared.

    In host memory, a gradient that was cleared through `.data` has the same version but is zero. The backward that
    reaches the module decides: others may run before it.
    """

    name = "gradient_start"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        # By module.
        self._known: dict[int, TrackedGradients] = {}

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            known = self._known.get(tracked.index)
            if known is None:
                known = self._known[tracked.index] = TrackedGradients(tracked)
            # The same object as long as the parameters of the optimizer and of all modules are the same.
            if known.signatures.get(optimizer.index) is not optimizer.signature:
                known.signatures[optimizer.index] = optimizer.signature
                known.indices = _choose(tracked)
            known.after_step = _identities(known.current())

    step_skipped = after_step

    def backward_called(self, root: Any = None) -> None:
        for known in self._known.values():
            if known.after_step is not None:
                known.found = _start(known.current(), known.after_step)
                if known.found is not known.written:
                    known.where = user_callsite()

    def backward_begun(self, tracked: TrackedModule) -> None:
        known = self._known.get(tracked.index)
        if known is None or known.after_step is None:
            return
        known.after_step = None
        if known.found is known.written or known.records >= MOST_RECORDS:
            return
        known.written = known.found
        known.records += 1
        last = known.records == MOST_RECORDS
        self.context.write(
            GradientStartRecord(tracked.index, tracked.steps, known.found.value, known.where, last)
        )

    unsynced_backward_begun = backward_begun

    def wrapper_released(self, tracked: TrackedModule) -> None:
        self._known.pop(tracked.index, None)


def _choose(tracked: TrackedModule) -> list[int]:
    """Sample parameters that optimizers step: no one clears the gradients of others."""
    owned = sorted(set().union(*tracked.owners.values())) if tracked.owners else []
    count = min(MOST_SAMPLES, len(owned))
    return [owned[number * len(owned) // count] for number in range(count)]


def _identities(gradients: Sequence[torch.Tensor | None]) -> GradientIdentities:
    if _all_none(gradients):
        return _NO_GRADIENTS
    return GradientIdentities(list(map(id, gradients)), torch_compat.tensor_versions(gradients))


def _all_none(gradients: Sequence[torch.Tensor | None]) -> bool:
    return all(gradient is None for gradient in gradients)


def _start(gradients: list[torch.Tensor | None], after_step: GradientIdentities) -> GradientStart:
    if after_step is _NO_GRADIENTS or _all_none(gradients):
        return GradientStart.CLEARED
    now = _identities(gradients)
    same = map(operator.eq, zip(*now, strict=True), zip(*after_step, strict=True))
    old = [
        gradient is not None and unchanged and not _is_zero(gradient)
        for gradient, unchanged in zip(gradients, same, strict=False)
    ]
    if not any(old):
        return GradientStart.CLEARED
    return GradientStart.OLD if all(old) else GradientStart.PARTLY_OLD


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether the first values are zero; False if they cannot be read without waiting for a device."""
    span = direct_span(gradient) if gradient.is_cpu else None
    if span is None:
        return False
    layout, address = span
    return not any(ctypes.string_at(address, min(_SAMPLE_BYTES, layout.nbytes)))

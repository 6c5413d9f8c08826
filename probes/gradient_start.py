"""Records whether the first backward of a step starts from cleared gradients or from those of the step before."""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
# In place of a gradient that does not exist.
_NONE = (0, 0)


class TrackedGradients:
    """Samples of the gradients of one module."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        # What the indices were chosen for.
        self.signature: tuple[Any, ...] = ()
        # Identity and version of each gradient after the last step; None: not known, or a backward has begun since.
        self.after_step: list[tuple[int, int]] | None = None
        self.found = GradientStart.CLEARED
        self.where = ""
        self.written = GradientStart.CLEARED
        self.records = 0


class GradientStartProbe(Probe):
    """A gradient that is the same object with the same version as after the last step was not cleared.

    In host memory, a gradient that was cleared through `.data` has the same version but is zero. The backward that
    reaches the module decides: others may run before it.
    """

    name = "gradient_start"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._tracked: dict[int, tuple[TrackedModule, TrackedGradients]] = {}

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            known = self._tracked.get(tracked.index)
            if known is None:
                known = self._tracked[tracked.index] = tracked, TrackedGradients()
            _choose(tracked, known[1])
            known[1].after_step = _identities(_gradients(tracked, known[1]))

    step_skipped = after_step

    def backward_called(self, root: Any = None) -> None:
        for tracked, known in self._tracked.values():
            if known.after_step is not None:
                known.found = _start(tracked, known, known.after_step)
                if known.found is not known.written:
                    known.where = user_callsite()

    def backward_begun(self, tracked: TrackedModule) -> None:
        entry = self._tracked.get(tracked.index)
        if entry is None or entry[1].after_step is None:
            return
        known = entry[1]
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
        self._tracked.pop(tracked.index, None)


def _choose(tracked: TrackedModule, known: TrackedGradients) -> None:
    """Sample parameters that optimizers step: no one clears the gradients of others."""
    signature = (tracked.revision, *map(len, tracked.owners.values()))
    if signature == known.signature:
        return
    known.signature = signature
    owned = sorted(set().union(*tracked.owners.values())) if tracked.owners else []
    count = min(MOST_SAMPLES, len(owned))
    known.indices = [owned[number * len(owned) // count] for number in range(count)]


def _gradients(tracked: TrackedModule, known: TrackedGradients) -> list[torch.Tensor | None]:
    slots = tracked.parameters
    try:
        return [slot.holder[slot.key].grad for slot in [slots[index] for index in known.indices]]
    except (IndexError, KeyError, AttributeError):
        # The program took a parameter out of its module.
        return [None] * len(known.indices)


def _identities(gradients: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """Object and version of each gradient; there is none without a gradient."""
    if _all_none(gradients):
        return [_NONE] * len(gradients)
    return list(zip(map(id, gradients), torch_compat.tensor_versions(gradients), strict=True))


def _all_none(gradients: Sequence[torch.Tensor | None]) -> bool:
    # Not `count`, which compares tensors.
    return all(map(operator.is_, gradients, itertools.repeat(None)))


def _start(
    tracked: TrackedModule, known: TrackedGradients, after_step: Sequence[tuple[int, int]]
) -> GradientStart:
    gradients = _gradients(tracked, known)
    if _all_none(gradients):
        return GradientStart.CLEARED
    old = [
        gradient is not None and now == before and not _is_zero(gradient)
        for gradient, now, before in zip(gradients, _identities(gradients), after_step, strict=True)
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

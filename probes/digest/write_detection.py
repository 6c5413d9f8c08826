"""Detects late writes to parameters and gradients from version counters and a few sampled bytes per tensor.

Version counters show every write that autograd sees. Writes through `.data` do not change them; nearly all of those
change the sampled bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpcheck import torch_compat
from ddpcheck.probes.scan.scanner import TensorScanner
from ddpcheck.records.reasons import WriteWindow

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.tracked_module import TrackedModule

# Sampled bytes of parameters and buffers: eight float32 values from the start, four from the middle.
FIRST = 32
MIDDLE = 16


class TensorSamples(NamedTuple):
    """Version counters and sampled bytes of a list of tensors at one time."""

    versions: list[int]
    # The first values of every tensor, each preceded by one byte with their size in bytes.
    first: bytes
    middle: bytes


def take_samples(scanner: TensorScanner, tensors: Sequence[torch.Tensor]) -> TensorSamples:
    """Samples of `tensors`, with which `scanner` was updated."""
    return TensorSamples(torch_compat.tensor_versions(tensors), *scanner.samples(tensors, FIRST, MIDDLE))


class ForwardSamples(NamedTuple):
    """Samples of the parameters at the begin of a forward, with the number of that forward."""

    number: int
    samples: TensorSamples


class WriteDetector:
    """Finds out in which part of a step parameters were written.

    Samples at the forward and at the backward, but only for modules with an earlier late write: code that writes once
    usually writes at every step, so the second write is located, and all other modules pay nothing.
    """

    def __init__(self) -> None:
        self._modules: set[int] = set()
        self._forwards: dict[int, ForwardSamples] = {}
        self._backwards: dict[int, TensorSamples] = {}

    @property
    def tracks(self) -> bool:
        """Whether there is such a module."""
        return bool(self._modules)

    def is_tracking(self, tracked: TrackedModule) -> bool:
        return tracked.index in self._modules

    def forward(self, tracked: TrackedModule, samples: TensorSamples) -> None:
        self._forwards.setdefault(tracked.index, ForwardSamples(tracked.forwards, samples))

    def backward(self, tracked: TrackedModule, samples: TensorSamples) -> None:
        self._backwards.setdefault(tracked.index, samples)

    def window(self, tracked: TrackedModule, before: TensorSamples | None) -> str:
        """The part of the step with the write that was detected at its end; "" if unknown."""
        self._modules.add(tracked.index)
        at_forward = self._forwards.pop(tracked.index, None)
        at_backward = self._backwards.pop(tracked.index, None)
        if at_forward is None or before is None:
            return ""
        if at_forward.samples != before:
            return WriteWindow.BEFORE_FORWARD.value
        # With several forwards, the write may have happened in any of them.
        if at_backward is None or tracked.forwards > at_forward.number + 1:
            return ""
        unchanged = at_backward == at_forward.samples
        return WriteWindow.AFTER_BACKWARD.value if unchanged else WriteWindow.IN_FORWARD.value

"""Detects late writes to parameters and gradients from version counters and a few sampled bytes per tensor.

Version counters show every write that autograd sees. Writes through `.data` do not change them; nearly all of those
change the sampled bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, direct_span, has_memory
from ddpcheck.records.reasons import WriteWindow
from ddpcheck.torch_compat import tensor_version

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule

# Sampled bytes of parameters and buffers: eight float32 values from the start, four from the middle.
FIRST = 32
MIDDLE = 16

# Gradients up to this size are hashed again instead: most loops over gradients write to a small one as well, and no
# write to it is missed.
READ_AGAIN = 1 << 18
# Sampled bytes of larger gradients.
WINDOWS = 16
WINDOW = 64
# No element has more bytes: a quick test for small tensors needs only the number of elements.
LARGEST_ELEMENT = 16

_EMPTY = (ctypes.c_char * 0)()


class TensorSamples(NamedTuple):
    """Version counters and sampled bytes of a list of tensors at one time."""

    versions: list[int]
    first: list[bytes]
    middle: list[bytes]

    def packed(self) -> bytes:
        """The first values of every tensor, each preceded by one byte with their size in bytes."""
        return b"".join([bytes((len(data),)) + data for data in self.first])


class SampleWindow(NamedTuple):
    """Views of the sampled bytes of a tensor, valid while its memory has this address and size."""

    span: tuple[int, int]
    first: ctypes.Array[ctypes.c_char]
    middle: ctypes.Array[ctypes.c_char]


class TensorSampler:
    """Samples one list of tensors repeatedly; the cached addresses are verified each time."""

    def __init__(self) -> None:
        self._windows: list[SampleWindow] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> TensorSamples:
        if len(self._windows) != len(tensors):
            self._windows = [_window(tensor) for tensor in tensors]
        windows = self._windows
        for index, tensor in enumerate(tensors):
            if _span(tensor) != windows[index].span:
                windows[index] = _window(tensor)
        return TensorSamples(
            [tensor_version(tensor) for tensor in tensors],
            [window.first.raw for window in windows],
            [window.middle.raw for window in windows],
        )


def version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0  # made in inference mode: no version counter


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size, since a smaller tensor may get the address of a larger one; 0: not readable."""
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
        return 0, 0
    try:
        # The first bytes are the first values only if memory order is logical order.
        size = tensor.nbytes if tensor.is_contiguous() else 0
        return (tensor.data_ptr(), size) if has_memory(tensor, size, tensor.element_size()) else (0, 0)
    except RuntimeError:
        return 0, 0  # sparse and similar layouts


def _window(tensor: torch.Tensor) -> SampleWindow:
    address, size = span = _span(tensor)
    if address == 0 or size == 0:
        return SampleWindow(span, _EMPTY, _EMPTY)
    first = (ctypes.c_char * min(FIRST, size)).from_address(address)
    if size < 2 * FIRST:
        return SampleWindow(span, first, _EMPTY)
    middle = (ctypes.c_char * MIDDLE).from_address(address + size // 2)
    return SampleWindow(span, first, middle)


def sample_gradient(gradient: torch.Tensor | None) -> bytes:
    """Bytes of a large gradient, evenly spaced; empty for those to hash again: small, on a device, or not plain."""
    if gradient is None or type(gradient) not in PLAIN_TYPES or not gradient.is_cpu:
        return b""
    span = direct_span(gradient) if gradient.numel() > READ_AGAIN // LARGEST_ELEMENT else None
    if span is None or span[0].nbytes <= READ_AGAIN:
        return b""
    layout, address = span
    # The first and the last bytes are included.
    last = layout.nbytes - WINDOW
    starts = [address + last * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return b"".join([ctypes.string_at(start, WINDOW) for start in starts])


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

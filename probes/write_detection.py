"""A few bytes of each tensor: enough to notice a rewrite, and to show values of a step that has passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, direct_span, has_memory
from ddpcheck.records.kinds.digests import WriteWindow

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule


# What is no larger is read again: most loops over gradients come by a small one, and there nothing escapes.
READ_AGAIN = 1 << 18
WINDOWS = 16
WINDOW = 64
# Elements have no more bytes than this: what is small by their number is small for certain, and quickly told.
LARGEST_ELEMENT = 16


def sample_windows(gradient: torch.Tensor | None) -> bytes:
    """Empty for what is to be read again: small gradients, those on a device, and what is no plain memory."""
    if gradient is None or type(gradient) not in PLAIN_TYPES or not gradient.is_cpu:
        return b""
    span = direct_span(gradient) if gradient.numel() > READ_AGAIN // LARGEST_ELEMENT else None
    if span is None or span[0].nbytes <= READ_AGAIN:
        return b""
    layout, address = span
    # The first and the last bytes are among them.
    last = layout.nbytes - WINDOW
    starts = [address + last * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return b"".join([ctypes.string_at(start, WINDOW) for start in starts])


# Eight float32 values from the start, four from the middle.
FIRST = 32
MIDDLE = 16

_NOTHING = (ctypes.c_char * 0)()


class TensorSamples(NamedTuple):
    """How tensors stood at one moment, as far as that can be told without reading them whole.

    Version counters show every write that autograd can see. Writes through `.data` pass them by; nearly all
    of those touch the sampled places.
    """

    versions: list[int]
    first: list[bytes]
    middle: list[bytes]

    def packed(self) -> bytes:
        """The first values of every tensor, each behind one byte that tells how many bytes they take."""
        return b"".join([bytes((len(data),)) + data for data in self.first])


class SampleWindow(NamedTuple):
    """Where to look in a tensor, good for as long as its memory stays where it is."""

    place: tuple[int, int]
    first: ctypes.Array[ctypes.c_char]
    middle: ctypes.Array[ctypes.c_char]


class TensorSampler:
    """Samples one list of tensors again and again; what it knows of their memory is checked each time."""

    def __init__(self) -> None:
        self._windows: list[SampleWindow] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> TensorSamples:
        if len(self._windows) != len(tensors):
            self._windows = [_window(tensor) for tensor in tensors]
        windows = self._windows
        for place, tensor in enumerate(tensors):
            if _place(tensor) != windows[place].place:
                windows[place] = _window(tensor)
        return TensorSamples(
            [version_of(tensor) for tensor in tensors],
            [window.first.raw for window in windows],
            [window.middle.raw for window in windows],
        )


def version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0  # made in inference mode: nobody counts


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size, as a smaller tensor may come to lie where a larger one was; 0: cannot be read."""
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
        return 0, 0
    try:
        # Only where memory order is logical order can the first bytes be shown as the first values.
        size = tensor.nbytes if tensor.is_contiguous() else 0
        return (tensor.data_ptr(), size) if has_memory(tensor, size, tensor.element_size()) else (0, 0)
    except RuntimeError:
        return 0, 0  # sparse and the like


def _window(tensor: torch.Tensor) -> SampleWindow:
    address, size = place = _place(tensor)
    if address == 0 or size == 0:
        return SampleWindow(place, _NOTHING, _NOTHING)
    first = (ctypes.c_char * min(FIRST, size)).from_address(address)
    if size < 2 * FIRST:
        return SampleWindow(place, first, _NOTHING)
    middle = (ctypes.c_char * MIDDLE).from_address(address + size // 2)
    return SampleWindow(place, first, middle)


class ForwardSamples(NamedTuple):
    """How parameters stood when a forward began, and which one it was."""

    number: int
    marks: TensorSamples


class WriteDetector:
    """Samples at the forward and at the backward, but only of modules that were written to before.

    Who writes once mostly does so at every step, so the second time tells; all others pay nothing for it.
    """

    def __init__(self) -> None:
        self._modules: set[int] = set()
        self._forwards: dict[int, ForwardSamples] = {}
        self._backwards: dict[int, TensorSamples] = {}

    def awaits(self, tracked: TrackedModule) -> bool:
        return tracked.index in self._modules

    def forward(self, tracked: TrackedModule, marks: TensorSamples) -> None:
        self._forwards.setdefault(tracked.index, ForwardSamples(tracked.forwards, marks))

    def backward(self, tracked: TrackedModule, marks: TensorSamples) -> None:
        self._backwards.setdefault(tracked.index, marks)

    def when(self, tracked: TrackedModule, before: TensorSamples | None) -> str:
        """When a write came that a step has found; "" where that cannot be told."""
        self._modules.add(tracked.index)
        seen = self._forwards.pop(tracked.index, None)
        at_backward = self._backwards.pop(tracked.index, None)
        if seen is None or before is None:
            return ""
        if seen.marks != before:
            return WriteWindow.BEFORE_FORWARD
        # Several forwards: the write may have come in any of them.
        if at_backward is None or tracked.forwards > seen.number + 1:
            return ""
        return WriteWindow.IN_FORWARD if at_backward != seen.marks else WriteWindow.AFTER_BACKWARD

"""A few windows into a large gradient: whether anybody wrote to it, without reading it a second time."""

from __future__ import annotations

import ctypes

import torch

from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, direct_span

# What is no larger is read again: most loops over gradients come by a small one, and there nothing escapes.
READ_AGAIN = 1 << 18
WINDOWS = 16
WINDOW = 64
# Elements have no more bytes than this: what is small by their number is small for certain, and quickly told.
LARGEST_ELEMENT = 16


def glimpse(gradient: torch.Tensor | None) -> bytes:
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

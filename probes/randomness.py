"""Tells by the generators' states whether random numbers were drawn between two moments; draws none."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from typing import Any

import torch

States = tuple[bytes, ...]


def states() -> States:
    """How torch's own generators of this process stand: read, never advanced.

    A device's generator keeps its seed and offset on the host, so nothing waits for the device. One that was
    never used is not woken up.
    """
    found = [_bytes(torch.default_generator)]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        # While a graph is being captured its generator cannot be read.
        with contextlib.suppress(RuntimeError):
            found.append(_bytes(cuda.default_generators[cuda.current_device()]))
    return tuple(found)


def drawn_from(before: States, after: States) -> str:
    """A digest of the states from which numbers were drawn in between; empty where none were.

    Ranks that give the same one drew the same numbers.
    """
    used = [then for then, now in zip(before, after, strict=False) if then != now]
    return hashlib.blake2b(b"".join(used), digest_size=6).hexdigest() if used else ""


def _bytes(generator: torch.Generator) -> bytes:
    with torch._C.DisableTorchFunction():
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

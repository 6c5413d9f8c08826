"""xxh3-128 on CPU: the tensors' own memory hashed in place, at the speed it can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from .label import seed_of
from .outline import outline
from .tensor_bytes import direct_span, layout_of
from .ticket import ReadyTicket
from .tree import UNSUPPORTED


class Reading:
    """A tensor that is hashed while somebody else reads it, piece by piece from its first element on."""

    __slots__ = ("_itemsize", "_memory", "_state")

    def __init__(self, state: Any, memory: memoryview, itemsize: int) -> None:
        self._state, self._memory, self._itemsize = state, memory, itemsize

    def take(self, start: int, size: int) -> None:
        """The next `size` elements, which are in the processor's cache by now."""
        self._state.update(self._memory[start * self._itemsize : (start + size) * self._itemsize])

    def leaf(self) -> bytes:
        leaf: bytes = self._state.digest()
        return leaf


class Xxh3Digester:
    """Hashes at once, on the calling thread; xxhash releases the interpreter lock for large tensors."""

    algorithm = "xxh3-128"

    def __init__(self, xxhash: ModuleType) -> None:
        self._hash: Callable[[Any, int], bytes] = xxhash.xxh3_128_digest
        self._begin: Callable[..., Any] = xxhash.xxh3_128

    def submit(self, tensors: Sequence[torch.Tensor]) -> ReadyTicket:
        leaves = []
        # A default device is a torch-function mode: it would make each look at a tensor ten times slower.
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                span = direct_span(tensor) if tensor.is_cpu else None
                if span is None:
                    leaves.append(self._leaf_of_parts(tensor))
                else:
                    layout, address = span
                    leaves.append(self._hash(layout.buffer_at(address), layout.seed))
        return ReadyTicket(leaves)

    def read_along(self, tensor: torch.Tensor) -> Reading | None:
        # Elements in any other order than that of their memory are not read as they are hashed.
        with torch._C.DisableTorchFunction():
            span = direct_span(tensor) if tensor.is_cpu and tensor.is_contiguous() else None
        if span is None:
            return None
        layout, address = span
        memory = memoryview(layout.buffer_at(address)).cast("B")
        return Reading(self._begin(seed=layout.seed), memory, layout.itemsize)

    def _leaf_of_parts(self, tensor: torch.Tensor) -> bytes:
        with torch.no_grad():
            whole = outline(tensor)
            if whole is None:
                return UNSUPPORTED
            return whole.leaf(iter([self._digest(label, memory) for label, memory in whole.memories()]))

    def _digest(self, label: bytes, memory: torch.Tensor) -> bytes:
        # A tensor from another device among CPU ones: slow, but one algorithm for the whole list.
        memory = memory if memory.is_cpu else memory.cpu()
        return self._hash(layout_of(memory).buffer_at(memory.data_ptr()), seed_of(label))

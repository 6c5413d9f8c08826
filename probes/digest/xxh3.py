"""xxh3-128 on CPU: the tensors' own memory hashed in place, at the speed it can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ddpcheck.probes.digest.flatten import outline
from ddpcheck.probes.digest.protocol import UNSUPPORTED, ReadyDigests, seed_of
from ddpcheck.probes.digest.tensor_bytes import TensorLayout, direct_span, layout_of


class Reading:
    """A tensor that is hashed while somebody else reads it, piece by piece from its first element on."""

    __slots__ = ("_address", "_layout", "_leaf", "_memory", "_state", "_xxhash")

    def __init__(self, xxhash: ModuleType, layout: TensorLayout, address: int) -> None:
        self._xxhash, self._layout, self._address = xxhash, layout, address
        self._state: Any = None
        self._leaf = b""

    def take(self, start: int, size: int) -> None:
        """The next `size` elements, which are in the processor's cache by now."""
        layout = self._layout
        if size == layout.numel:
            self._leaf = self._xxhash.xxh3_128_digest(layout.buffer_at(self._address), layout.seed)
            return
        if self._state is None:
            self._state = self._xxhash.xxh3_128(seed=layout.seed)
            self._memory = memoryview(layout.buffer_at(self._address)).cast("B")
        self._state.update(self._memory[start * layout.itemsize : (start + size) * layout.itemsize])

    def leaf(self) -> bytes:
        return self._leaf if self._state is None else bytes(self._state.digest())


class Xxh3Digester:
    """Hashes at once, on the calling thread; xxhash releases the interpreter lock for large tensors."""

    algorithm = "xxh3-128"

    def __init__(self, xxhash: ModuleType) -> None:
        self._hash: Callable[[Any, int], bytes] = xxhash.xxh3_128_digest
        self._xxhash = xxhash

    def submit(self, tensors: Sequence[torch.Tensor]) -> ReadyDigests:
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
        return ReadyDigests(leaves)

    def read_along(self, tensor: torch.Tensor) -> Reading | None:
        # Elements in any other order than that of their memory are not read as they are hashed.
        with torch._C.DisableTorchFunction():
            span = direct_span(tensor) if tensor.is_cpu else None
        if span is None or not span[0].by_rows:
            return None
        return Reading(self._xxhash, *span)

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

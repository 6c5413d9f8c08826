"""xxh3-128 on CPU: hashes the memory of tensors in place, at memory speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.flatten import flatten
from ddpcheck.probes.digest.protocol import UNSUPPORTED, ReadyDigests, seed_of
from ddpcheck.probes.digest.tensor_bytes import TensorLayout, direct_span, layout_of


class IncrementalHash:
    """Hashes a tensor while another reader passes over it, piece by piece from its first element."""

    __slots__ = ("_address", "_layout", "_leaf", "_memory", "_state", "_xxhash")

    def __init__(self, xxhash: ModuleType, layout: TensorLayout, address: int) -> None:
        self._xxhash, self._layout, self._address = xxhash, layout, address
        self._state: Any = None
        self._leaf = b""

    def update(self, start: int, size: int) -> None:
        """Hash the next `size` elements, which are in the processor's cache at this point."""
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
    """Hashes immediately, on the calling thread; xxhash releases the GIL for large tensors."""

    algorithm = "xxh3-128"

    def __init__(self, xxhash: ModuleType) -> None:
        self._hash: Callable[[Any, int], bytes] = xxhash.xxh3_128_digest
        self._xxhash = xxhash

    def submit(self, tensors: Sequence[torch.Tensor]) -> ReadyDigests:
        leaves = []
        # A default device is a torch-function mode: it would make each tensor attribute ten times slower.
        with torch_compat.no_torch_function():
            for tensor in tensors:
                span = direct_span(tensor) if tensor.is_cpu else None
                if span is None:
                    leaves.append(self._leaf_of_parts(tensor))
                else:
                    layout, address = span
                    leaves.append(self._hash(layout.buffer_at(address), layout.seed))
        return ReadyDigests(leaves)

    def incremental_hash(self, tensor: torch.Tensor) -> IncrementalHash | None:
        # The reader goes row by row, the hash in memory order: both must be the same.
        with torch_compat.no_torch_function():
            span = direct_span(tensor) if tensor.is_cpu else None
        if span is None or not span[0].by_rows:
            return None
        return IncrementalHash(self._xxhash, *span)

    def _leaf_of_parts(self, tensor: torch.Tensor) -> bytes:
        with torch.no_grad():
            flat = flatten(tensor)
            if flat is None:
                return UNSUPPORTED
            return flat.leaf(iter([self._digest(header, memory) for header, memory in flat.spans()]))

    def _digest(self, header: bytes, memory: torch.Tensor) -> bytes:
        # A tensor of another device among CPU tensors: slow, but one algorithm for the whole list.
        memory = memory if memory.is_cpu else memory.cpu()
        return self._hash(layout_of(memory).buffer_at(memory.data_ptr()), seed_of(header))

"""xxh3-128 on CPU: hashes the memory of tensors in place, at memory speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.flatten import flatten
from ddpcheck.probes.digest.protocol import UNSUPPORTED, ReadyDigests, seed_of
from ddpcheck.probes.digest.tensor_bytes import direct_span, layout_of


class Xxh3Digester:
    """Hashes immediately, on the calling thread; xxhash releases the GIL for large tensors."""

    algorithm = "xxh3-128"

    def __init__(self, xxhash: ModuleType) -> None:
        self._hash: Callable[[Any, int], bytes] = xxhash.xxh3_128_digest

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

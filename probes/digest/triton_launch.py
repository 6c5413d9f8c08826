"""Launches the Triton kernel on CUDA: builds its table of addresses, and verifies it on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from ddpcheck.probes.digest.multilinear_torch import as_words, lane_sums

# Enough for parameters, gradients and buffers of a few modules; each entry is one small tensor on the device.
_TABLES_KEPT = 16


class FusedHash:
    """One launch for all tensors of one CUDA device."""

    def __init__(self, kernel: ModuleType, device: torch.device) -> None:
        self._kernel = kernel
        self._device = device
        self._tables: dict[tuple[int, tuple[tuple[int, int], ...]], torch.Tensor] = {}

    def lanes(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        # Padded copies must live until the launch; the allocator reuses them only after it in stream order.
        words = [memory if _readable_in_place(memory) else as_words(memory) for memory in memories]
        spans = tuple((each.data_ptr(), each.numel() * each.element_size() // 4) for each in words)
        with torch.cuda.device(self._device):
            result: torch.Tensor = self._kernel.launch(self._table(spans), len(spans))
        return result

    def _table(self, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
        # A table is uploaded in order on one stream; another stream might read it before it is complete.
        key = (torch.cuda.current_stream(self._device).cuda_stream, spans)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _TABLES_KEPT:
                self._tables.pop(next(iter(self._tables)))
            rows = self._kernel.program_table(spans)
            host = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 4).pin_memory()
            table = self._tables[key] = host.to(self._device, non_blocking=True)
        return table


def _readable_in_place(memory: torch.Tensor) -> bool:
    return memory.data_ptr() % 4 == 0 and memory.numel() * memory.element_size() % 4 == 0


def fused_hash(device: torch.device) -> FusedHash | None:
    """The fused hash if Triton is installed, compiles, and gives the same result as the torch version here."""
    try:
        from ddpcheck.probes.digest import triton_kernel

        fused = FusedHash(triton_kernel, device)
        sample = torch.arange(70_001, dtype=torch.int32, device=device) * 0x61C88647
        samples = [sample, sample[1:5]]
        if torch.equal(fused.lanes(samples), lane_sums(samples, device)):
            return fused
    except Exception:
        # No compiler, an unknown GPU, another Triton: each raises its own types. None of them matters, since the torch
        # operations give the same digests.
        pass
    return None

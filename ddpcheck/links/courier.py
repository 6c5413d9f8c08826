"""Carries bytes from one rank to another and says how long it took, on any backend that can send and receive."""

from __future__ import annotations

import time
from typing import Any

import torch

# On CUDA nothing of this has met a device yet: beside where tensors live, only `settle` differs.


class Courier:
    """Point to point messages of one process group."""

    def __init__(self, device: str) -> None:
        self._distributed: Any = torch.distributed
        self._device = torch.device(device)
        self._buffers: dict[int, torch.Tensor] = {}
        self._number = torch.zeros(1, dtype=torch.int64, device=self._device)

    def send_number(self, number: int, to: int) -> None:
        self._number.fill_(number)
        self._distributed.send(self._number, to)

    def receive_number(self, source: int) -> int:
        self._distributed.recv(self._number, source)
        return int(self._number.item())

    def send(self, size: int, to: int) -> None:
        self._distributed.send(self._buffer(size), to)

    def receive(self, size: int, source: int) -> None:
        self._distributed.recv(self._buffer(size), source)

    def reduce(self, size: int) -> None:
        """An AllReduce of so many bytes over all ranks."""
        self._distributed.all_reduce(self._buffer(size).view(torch.float32))
        self.settle()

    def settle(self) -> None:
        """What was started on a device has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def now(self) -> float:
        self.settle()
        return time.perf_counter()

    def _buffer(self, size: int) -> torch.Tensor:
        """Of whole floats, and zeros: sums of them stay zeros."""
        if size not in self._buffers:
            self._buffers[size] = torch.zeros(max(4, size // 4 * 4), dtype=torch.uint8, device=self._device)
        return self._buffers[size]

"""The multilinear-128 digester: groups tensors by device, hashes them there, completes the leaves on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.digest.flatten import FlatTensor, flatten
from ddpcheck.probes.digest.multilinear_torch import lane_sums
from ddpcheck.probes.digest.protocol import UNSUPPORTED, DigestFuture, ReadyDigests, finish_leaf
from ddpcheck.probes.digest.tensor_bytes import direct_span


@dataclass(slots=True)
class _Batch:
    """One submission: the spans to hash by device, and where to find the digests of each leaf."""

    flattened: list[FlatTensor | None] = field(default_factory=list)
    # Per span, in order: its header, its device, its row among the lanes of that device.
    rows: list[tuple[bytes, torch.device, int]] = field(default_factory=list)
    spans: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> None:
        span = direct_span(tensor) if not tensor.is_meta else None
        if span is not None:
            self.flattened.append(FlatTensor(span[0].header))
            self._add_span(span[0].header, tensor)
            return
        flat = flatten(tensor)
        self.flattened.append(flat and flat.without_memory())
        if flat is not None:
            for header, memory in flat.spans():
                self._add_span(header, memory)

    def _add_span(self, header: bytes, memory: torch.Tensor) -> None:
        spans = self.spans.setdefault(memory.device, [])
        self.rows.append((header, memory.device, len(spans)))
        spans.append(memory)


class MultilinearFuture:
    """Lanes that are being copied from one or more devices. Holds no tensor of the user."""

    __slots__ = ("_copies", "_flattened", "_leaves", "_rows")

    def __init__(self, batch: _Batch, copies: dict[torch.device, HostCopy]) -> None:
        self._flattened, self._rows, self._copies = batch.flattened, batch.rows, copies
        self._leaves: list[bytes] | None = None

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies.values())

    def result(self) -> list[bytes]:
        if self._leaves is None:
            digests = self._digests()
            self._leaves = [UNSUPPORTED if each is None else each.leaf(digests) for each in self._flattened]
        return self._leaves

    def _digests(self) -> Iterator[bytes]:
        rows = {device: copy.rows() for device, copy in self._copies.items()}
        for header, device, row in self._rows:
            yield finish_leaf(header, rows[device][row])


class MultilinearDigester:
    """Operators of torch: works on every device, and the same bits give the same leaf on all devices.

    Plain tensors of a device that has a kernel are rows of a table instead (`scan/device_table.py`).
    """

    algorithm = "multilinear-128"

    def submit(self, tensors: Sequence[torch.Tensor]) -> DigestFuture:
        # A default device is a torch-function mode: it would make each tensor attribute ten times slower.
        with torch_compat.no_torch_function(), torch.no_grad():
            if device_api.capturing():
                # During graph capture kernels are recorded, not run: there are no values to hash yet.
                return ReadyDigests([UNSUPPORTED] * len(tensors))
            batch = _Batch()
            for tensor in tensors:
                batch.add(tensor)
            lanes = {device: lane_sums(memories, device) for device, memories in batch.spans.items()}
            return MultilinearFuture(batch, {device: copy_to_host(rows) for device, rows in lanes.items()})

"""The multilinear-128 digester: tensors sorted by device, hashed there, their leaves finished on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ddpcheck.probes.digest.device_copy import Copy, copy_to_host
from ddpcheck.probes.digest.flatten import FlatTensor, outline
from ddpcheck.probes.digest.multilinear_torch import lane_sums
from ddpcheck.probes.digest.protocol import UNSUPPORTED, DigestFuture, ReadyDigests, finish
from ddpcheck.probes.digest.tensor_bytes import direct_span
from ddpcheck.probes.digest.triton_launch import FusedHash, fused_hash


@dataclass(slots=True)
class _Batch:
    """One submission: the spans to hash by device, and where each leaf's digests are to be found."""

    outlines: list[FlatTensor | None] = field(default_factory=list)
    # Per span, in order: its label, its device, its row among that device's lanes.
    places: list[tuple[bytes, torch.device, int]] = field(default_factory=list)
    memories: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> None:
        span = direct_span(tensor) if not tensor.is_meta else None
        if span is not None:
            self.outlines.append(FlatTensor(span[0].label))
            self._place(span[0].label, tensor)
            return
        whole = outline(tensor)
        self.outlines.append(whole and whole.without_memory())
        if whole is not None:
            for label, memory in whole.memories():
                self._place(label, memory)

    def _place(self, label: bytes, memory: torch.Tensor) -> None:
        rows = self.memories.setdefault(memory.device, [])
        self.places.append((label, memory.device, len(rows)))
        rows.append(memory)


class MultilinearFuture:
    """Lanes under way from one or more devices. Holds no tensor of the user's."""

    __slots__ = ("_copies", "_leaves", "_outlines", "_places")

    def __init__(self, batch: _Batch, copies: dict[torch.device, Copy]) -> None:
        self._outlines, self._places, self._copies = batch.outlines, batch.places, copies
        self._leaves: list[bytes] | None = None

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies.values())

    def result(self) -> list[bytes]:
        if self._leaves is None:
            digests = self._digests()
            self._leaves = [UNSUPPORTED if each is None else each.leaf(digests) for each in self._outlines]
        return self._leaves

    def _digests(self) -> Iterator[bytes]:
        rows = {device: copy.rows() for device, copy in self._copies.items()}
        for label, device, row in self._places:
            yield finish(label, rows[device][row])


class MultilinearDigester:
    """Works on every device; the same bits give the same leaf on all of them."""

    algorithm = "multilinear-128"

    def __init__(self) -> None:
        self._fused: dict[torch.device, FusedHash | None] = {}

    def submit(self, tensors: Sequence[torch.Tensor]) -> DigestFuture:
        # A default device is a torch-function mode: it would make each look at a tensor ten times slower.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                # Under graph capture kernels are recorded, not run: there are no values to hash yet.
                return ReadyDigests([UNSUPPORTED] * len(tensors))
            batch = _Batch()
            for tensor in tensors:
                batch.add(tensor)
            lanes = {device: self._lanes(device, memories) for device, memories in batch.memories.items()}
            return MultilinearFuture(batch, {device: copy_to_host(rows) for device, rows in lanes.items()})

    def read_along(self, tensor: torch.Tensor) -> None:
        """Its kernels read for themselves."""

    def _lanes(self, device: torch.device, memories: list[torch.Tensor]) -> torch.Tensor:
        if device.type == "cuda":
            if device not in self._fused:
                self._fused[device] = fused_hash(device)
            fused = self._fused[device]
            if fused is not None:
                return fused.lanes(memories)
        return lane_sums(memories, device)

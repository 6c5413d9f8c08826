"""Sends tensors to the digester of their device, and merges the results of several devices in order."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.digest import ReadyDigests, make_digester

if TYPE_CHECKING:
    from ddpcheck.probes.digest import Digester, DigestFuture, IncrementalHash


@functools.cache
def _digester(device_type: str) -> Digester:
    return make_digester(device_type)


class MixedFuture:
    """Digests from several sources, such as digesters of different device types."""

    def __init__(self, indices: list[list[int]], futures: list[DigestFuture]) -> None:
        self._indices = indices
        self._futures = futures

    def ready(self) -> bool:
        return all(future.ready() for future in self._futures)

    def result(self) -> list[bytes]:
        leaves = [b""] * sum(map(len, self._indices))
        for indices, future in zip(self._indices, self._futures, strict=True):
            for index, leaf in zip(indices, future.result(), strict=True):
                leaves[index] = leaf
        return leaves


def incremental_hash(tensor: torch.Tensor) -> IncrementalHash | None:
    """Hashes `tensor` while it is read for another purpose; None: use `submit`."""
    return _digester(tensor.device.type).incremental_hash(tensor)


def submit_rest(tensors: Sequence[torch.Tensor], known: Mapping[int, bytes]) -> DigestFuture:
    """Submit all tensors except those whose leaves are known already (by index)."""
    if not known:
        return submit(tensors)
    rest = [index for index in range(len(tensors)) if index not in known]
    submitted = submit([tensors[index] for index in rest])
    return MixedFuture([list(known), rest], [ReadyDigests(list(known.values())), submitted])


def submit(tensors: Sequence[torch.Tensor]) -> DigestFuture:
    kinds: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(tensor.device.type, []).append(index)
    if len(kinds) <= 1:
        return _digester(next(iter(kinds), "cpu")).submit(tensors)
    futures = [
        _digester(kind).submit([tensors[index] for index in indices]) for kind, indices in kinds.items()
    ]
    return MixedFuture(list(kinds.values()), futures)

"""Sends tensors to the digester of their device, and merges the results of several devices in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.digest import make_digester

if TYPE_CHECKING:
    from ddpcheck.probes.digest import Digester, DigestFuture


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

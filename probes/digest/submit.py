"""Hands tensors to the digester of their device, and puts mixed ones back in order."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.digest import ReadyDigests, make_digester

if TYPE_CHECKING:
    from ddpcheck.probes.digest import Digester, DigestFuture, Reading


@functools.cache
def _digester(device_type: str) -> Digester:
    return make_digester(device_type)


class MixedFuture:
    """Digests of tensors that went different ways, as those on several kinds of devices do."""

    def __init__(self, places: list[list[int]], tickets: list[DigestFuture]) -> None:
        self._places = places
        self._tickets = tickets

    def ready(self) -> bool:
        return all(ticket.ready() for ticket in self._tickets)

    def result(self) -> list[bytes]:
        leaves = [b""] * sum(map(len, self._places))
        for places, ticket in zip(self._places, self._tickets, strict=True):
            for place, leaf in zip(places, ticket.result(), strict=True):
                leaves[place] = leaf
        return leaves


def read_along(tensor: torch.Tensor) -> Reading | None:
    """For hashing `tensor` in the course of a reading; None: submit it."""
    return _digester(tensor.device.type).read_along(tensor)


def submit_rest(tensors: Sequence[torch.Tensor], known: Mapping[int, bytes]) -> DigestFuture:
    """All but those whose leaves are known already, by their place."""
    if not known:
        return submit(tensors)
    rest = [place for place in range(len(tensors)) if place not in known]
    submitted = submit([tensors[place] for place in rest])
    return MixedFuture([list(known), rest], [ReadyDigests(list(known.values())), submitted])


def submit(tensors: Sequence[torch.Tensor]) -> DigestFuture:
    kinds: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault(tensor.device.type, []).append(place)
    if len(kinds) <= 1:
        return _digester(next(iter(kinds), "cpu")).submit(tensors)
    tickets = [_digester(kind).submit([tensors[p] for p in places]) for kind, places in kinds.items()]
    return MixedFuture(list(kinds.values()), tickets)

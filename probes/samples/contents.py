"""Fingerprints of a few samples that can be named by their index: the same indices on every rank and in every epoch."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.samples.fingerprint import read_sampled
from ddpcheck.records.kinds.data import SamplesRecord

# Indices of a dataset that are followed, and passes over a loader that are recorded.
MOST_CHOSEN = 128
MOST_PASSES = 16
# Parts of a sample: inputs, labels, masks, …
MOST_PARTS = 4
MAX_DEPTH = 3
# Bytes read of one part of a sample.
MOST_BYTES = 2048
# Batches that workers have drawn and that the loader has not returned yet.
MOST_DRAWN = 4096
_SEED = 0x5EED
# Of a part: one integer or text for each sample, several integers, numbers with a fraction.
LABEL, INTEGERS, NUMBERS = "i", "I", "f"


def chosen_indices(length: int) -> frozenset[int]:
    """Depends on the length of the dataset alone. Draws from a generator of its own."""
    if length <= MOST_CHOSEN:
        return frozenset(range(max(0, length)))
    return frozenset(random.Random(_SEED).sample(range(length), MOST_CHOSEN))


class SampleContents:
    """The followed samples of one pass over a loader."""

    def __init__(self, chosen: frozenset[int]) -> None:
        self._chosen = chosen
        # By batch that was drawn: positions and indices of its followed samples.
        self._drawn: deque[list[tuple[int, int]] | None] = deque()
        self._sizes: deque[int] = deque()
        self._kinds = ""
        self._indices: list[int] = []
        self._digests: list[str] = []
        self._off = not chosen

    def drawn(self, index: Any) -> None:
        if self._off:
            return
        if not isinstance(index, (list, tuple)) or len(self._drawn) >= MOST_DRAWN:
            self._off = True
            return
        try:
            none = self._chosen.isdisjoint(index)
        except TypeError:
            self._off = True  # indices that are no numbers
            return
        self._drawn.append(None if none else [(at, i) for at, i in enumerate(index) if i in self._chosen])
        self._sizes.append(len(index))

    def received(self, batch: Any) -> None:
        """The loader has returned the oldest batch that was drawn."""
        if self._off or not self._drawn:
            return
        followed, size = self._drawn.popleft(), self._sizes.popleft()
        if followed is None or len(self._indices) >= MOST_CHOSEN:
            return
        parts = _parts(batch, size)
        kinds = "".join(map(_kind_of, parts))
        if not parts or (self._kinds and kinds != self._kinds):
            self._off = True  # a batch whose rows are not its samples
            return
        self._kinds = kinds
        with torch_compat.no_torch_function(), torch.no_grad():
            for row, index in followed:
                self._indices.append(index)
                self._digests.append("".join(_digest(part[row]) for part in parts))

    def record(self, loader: int, epoch: int, module: int, step: int) -> SamplesRecord | None:
        if self._off or not self._indices:
            return None
        return SamplesRecord(loader, epoch, module, step, self._kinds, self._indices, self._digests)


def _parts(batch: Any, size: int) -> list[Any]:
    """The parts of a batch that have one row for each sample, in order: tensors on the host, and lists of texts."""
    parts: list[Any] = []
    _add_parts(batch, size, parts, MAX_DEPTH)
    return parts[:MOST_PARTS]


def _add_parts(thing: Any, size: int, parts: list[Any], depth: int) -> None:
    if isinstance(thing, torch.Tensor):
        if thing.dim() and thing.shape[0] == size and thing.is_cpu:
            parts.append(thing)
    elif isinstance(thing, dict) and depth:
        for value in list(thing.values())[: 4 * MOST_PARTS]:
            _add_parts(value, size, parts, depth - 1)
    elif isinstance(thing, (list, tuple)) and depth:
        if len(thing) == size and all(type(each) is str for each in thing):
            parts.append(thing)
            return
        for value in thing[: 4 * MOST_PARTS]:
            _add_parts(value, size, parts, depth - 1)


def _kind_of(part: torch.Tensor | Sequence[str]) -> str:
    if not isinstance(part, torch.Tensor):
        return LABEL
    if part.is_floating_point() or part.is_complex():
        return NUMBERS
    return LABEL if part[0].numel() == 1 else INTEGERS


def _digest(row: torch.Tensor | str) -> str:
    data = read_sampled(row, MOST_BYTES) if isinstance(row, torch.Tensor) else row.encode("utf-8", "replace")
    return hashlib.blake2b(data, digest_size=4).hexdigest()

"""multilinear-128 in torch operations, for every device: int64 arithmetic wraps modulo 2**64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from ddpcheck.device_api import api_of
from ddpcheck.probes.digest.tensor_bytes import SERIAL_ELEMENTS, copy_serially, span_view
from ddpcheck.records.sketch_signs import (
    BLOCK_SEEDS,
    BLOCK_WORDS,
    GAMMA,
    LANES,
    MASK32,
    MIX_1,
    MIX_2,
    WORD_SEEDS,
    signed64,
)

# Blocks per operation: on CPU few enough to stay on one thread and in its cache, elsewhere enough to fill a
# device, at the cost of 32 MB of scratch memory.
CPU_ROWS = SERIAL_ELEMENTS // BLOCK_WORDS
DEVICE_ROWS = 2048

_word_keys: dict[torch.device, torch.Tensor] = {}
_block_keys: dict[torch.device, torch.Tensor] = {}


def lane_sums(memories: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The lanes of each dense tensor, without its header: int64, one row per tensor, on `device`."""
    if not memories:
        return torch.empty((0, LANES), dtype=torch.int64, device=device)
    words = [as_words(memory) for memory in memories]
    blocks = [_blocks_in(each) for each in words]
    level_1 = _BlockSums(device, sum(blocks))
    for each in words:
        level_1.add(each)
    level_1.flush()
    order = _order_of(device, tuple(blocks))
    terms = _terms(level_1.sums, block_keys(device, max(blocks)).index_select(2, order.blocks))
    before = _running_sums(terms).index_select(1, order.bounds)
    return (before[:, 1:] - before[:, :-1]).t()


def as_words(memory: torch.Tensor) -> torch.Tensor:
    """A dense tensor's span as int32 words: in place if size and address allow, else in a padded copy."""
    nbytes = memory.numel() * memory.element_size()
    offset = memory.storage_offset() * memory.element_size()
    if nbytes % 4 == 0 and offset % 4 == 0 and memory.data_ptr() % 4 == 0:
        return span_view(memory, torch.int32)
    padded = torch.empty((nbytes + 3) // 4, dtype=torch.int32, device=memory.device)
    padded[-1:].zero_()
    copy_serially(span_view(padded, torch.uint8)[:nbytes], span_view(memory, torch.uint8))
    return padded


class _BlockSums:
    """Level 1, filled chunk by chunk; small tensors share a chunk and are copied together.

    Every operation has a fixed cost, and most models have many small parameters.
    """

    def __init__(self, device: torch.device, blocks: int) -> None:
        self._rows = min(blocks, CPU_ROWS if device.type == "cpu" else DEVICE_ROWS)
        self.sums = torch.empty((LANES, blocks), dtype=torch.int64, device=device)
        self._words = torch.empty((self._rows, BLOCK_WORDS), dtype=torch.int64, device=device)
        self._flat = self._words.view(-1)
        self._products = torch.empty_like(self._words)
        self._keys = word_keys(device).unbind()
        self._zeros = torch.zeros(BLOCK_WORDS, dtype=torch.int32, device=device)
        # Pieces of the tensors in this chunk, and what fills up their last blocks.
        self._pieces: list[torch.Tensor] = []
        self._filled = self._done = 0

    def add(self, words: torch.Tensor) -> None:
        blocks, block = _blocks_in(words), 0
        while block < blocks:
            take = min(blocks - block, self._rows - self._filled)
            whole = block == 0 and take == blocks
            piece = words if whole else words[block * BLOCK_WORDS : (block + take) * BLOCK_WORDS]
            self._pieces.append(piece)
            missing = take * BLOCK_WORDS - piece.numel()
            if missing:
                self._pieces.append(self._zeros[:missing])
            block += take
            self._filled += take
            if self._filled == self._rows:
                self.flush()

    def flush(self) -> None:
        words, products = self._words[: self._filled], self._products[: self._filled]
        if self._pieces:
            pieces = self._pieces
            self._flat[: self._filled * BLOCK_WORDS].copy_(
                pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            )
            self._pieces = []
        words.bitwise_and_(MASK32)  # widening int32 copied the sign; words are unsigned
        for lane, keys in enumerate(self._keys):
            torch.mul(words, keys, out=products)
            sums = self.sums[lane, self._done : self._done + self._filled]
            torch.sum(products, 1, dtype=torch.int64, out=sums)
        self._done += self._filled
        self._filled = 0


class _BlockOrder(NamedTuple):
    """The blocks of several tensors in sequence."""

    # The number of each block in its tensor.
    blocks: torch.Tensor
    # Where the blocks of each tensor begin, and where those of the last one end.
    bounds: torch.Tensor


@lru_cache(maxsize=32)
def _order_of(device: torch.device, blocks: tuple[int, ...]) -> _BlockOrder:
    """For tensors with so many blocks each: a model has the same ones at every step."""
    numbers = [number for count in blocks for number in range(count)]
    bounds = [0, *accumulate(blocks)]
    with torch.inference_mode(False):
        return _BlockOrder(
            _synchronized(torch.tensor(numbers, dtype=torch.int64, device=device)),
            _synchronized(torch.tensor(bounds, dtype=torch.int64, device=device)),
        )


def _terms(sums: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Level 2 before its final sum: one term per lane and block."""
    terms = torch.empty_like(sums)
    for start, stop in _pieces(sums.shape[1], LANES):
        piece = sums[:, start:stop]
        low, high = piece & MASK32, (piece >> 32) & MASK32
        terms[:, start:stop] = low * keys[:, 0, start:stop] + high * keys[:, 1, start:stop]
    return terms


def word_keys(device: torch.device) -> torch.Tensor:
    """Level 1's keys, one row per lane."""
    keys = _word_keys.get(device)
    if keys is None:
        keys = torch.stack([_splitmix64(seed, BLOCK_WORDS, device) for seed in WORD_SEEDS])
        _word_keys[device] = _synchronized(keys)
    return keys


def block_keys(device: torch.device, blocks: int) -> torch.Tensor:
    """Level 2's keys for at least `blocks` blocks, by lane, half and block."""
    keys = _block_keys.get(device)
    if keys is None or keys.shape[2] < blocks:
        count = 1 << max(blocks - 1, 63).bit_length()
        keys = torch.stack([_splitmix64(seed, 2 * count, device).view(count, 2).t() for seed in BLOCK_SEEDS])
        _block_keys[device] = _synchronized(keys)
    return keys


def _synchronized(keys: torch.Tensor) -> torch.Tensor:
    """Keys are made on one stream and read on any: one wait here saves an event at every use."""
    api = api_of(keys.device)
    if api is not None:
        # The current device may be another.
        api.synchronize(keys.device)
    return keys


def _splitmix64(seed: int, count: int, device: torch.device) -> torch.Tensor:
    pieces = []
    for start, stop in _pieces(count):
        counter = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device)
        z = counter * signed64(GAMMA) + signed64(seed)
        z = (z ^ _shift(z, 30)) * signed64(MIX_1)
        z = (z ^ _shift(z, 27)) * signed64(MIX_2)
        pieces.append(z ^ _shift(z, 31))
    return torch.cat(pieces)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; the shift of torch is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _running_sums(terms: torch.Tensor) -> torch.Tensor:
    """The sum of the terms before each block, and of all; differences of two are exact, since int64 wraps."""
    sums = torch.zeros((LANES, terms.shape[1] + 1), dtype=torch.int64, device=terms.device)
    for start, stop in _pieces(terms.shape[1], LANES):
        piece = sums[:, start + 1 : stop + 1]
        torch.cumsum(terms[:, start:stop], 1, out=piece)
        if start:
            piece += sums[:, start : start + 1]
    return sums


def _pieces(count: int, width: int = 1) -> Iterator[tuple[int, int]]:
    size = SERIAL_ELEMENTS // width
    for start in range(0, max(count, 1), size):
        yield start, min(start + size, count)


def _blocks_in(words: torch.Tensor) -> int:
    return -(-words.numel() // BLOCK_WORDS)

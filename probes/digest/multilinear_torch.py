"""multilinear-128 in torch operations, for every device: int64 arithmetic wraps modulo 2**64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .keys import BLOCK_SEEDS, BLOCK_WORDS, GAMMA, LANES, MASK32, MIX_1, MIX_2, WORD_SEEDS, signed64
from .tensor_bytes import SERIAL_ELEMENTS, copy_serially, span_view

# Blocks worked on at once: on CPU few enough to stay on one thread and in its cache, elsewhere enough to fill
# a device, at the price of 32 MB of scratch.
CPU_ROWS = SERIAL_ELEMENTS // BLOCK_WORDS
DEVICE_ROWS = 2048

_word_keys: dict[torch.device, torch.Tensor] = {}
_block_keys: dict[torch.device, torch.Tensor] = {}


def lane_sums(memories: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The lanes of each dense tensor, without its label: int64, one row per tensor, on `device`."""
    words = [as_words(memory) for memory in memories]
    blocks = [_blocks_in(each) for each in words]
    terms = _Terms(device, sum(blocks), max(blocks, default=0))
    for each in words:
        terms.add(each)
    terms.flush()
    rows = [_sum_serially(part) for part in torch.split(terms.values, blocks, 1)] if blocks else []
    return torch.stack(rows) if rows else torch.empty((0, LANES), dtype=torch.int64, device=device)


def as_words(memory: torch.Tensor) -> torch.Tensor:
    """A dense tensor's span as int32 words: in place where size and address allow, else in a padded copy."""
    nbytes = memory.numel() * memory.element_size()
    offset = memory.storage_offset() * memory.element_size()
    if nbytes % 4 == 0 and offset % 4 == 0 and memory.data_ptr() % 4 == 0:
        return span_view(memory, torch.int32)
    padded = torch.empty((nbytes + 3) // 4, dtype=torch.int32, device=memory.device)
    padded[-1:].zero_()
    copy_serially(span_view(padded, torch.uint8)[:nbytes], span_view(memory, torch.uint8))
    return padded


class _Terms:
    """Level 2's summands, one per lane and block, filled chunk by chunk: small tensors share a chunk."""

    def __init__(self, device: torch.device, blocks: int, longest: int) -> None:
        rows = min(blocks, CPU_ROWS if device.type == "cpu" else DEVICE_ROWS)
        self.values = torch.empty((LANES, blocks), dtype=torch.int64, device=device)
        # Zeros, and zeroed again by every flush: the last block of a tensor is seldom full.
        self._words = torch.zeros((rows, BLOCK_WORDS), dtype=torch.int64, device=device)
        self._flat = self._words.view(-1)
        self._products = torch.empty_like(self._words)
        self._keys = torch.empty((LANES, 2, rows), dtype=torch.int64, device=device)
        self._word_keys = word_keys(device)
        self._block_keys = block_keys(device, longest)
        self._rows, self._filled, self._done = rows, 0, 0

    def add(self, words: torch.Tensor) -> None:
        blocks, block = _blocks_in(words), 0
        while block < blocks:
            take = min(blocks - block, self._rows - self._filled)
            self._fill(words[block * BLOCK_WORDS : (block + take) * BLOCK_WORDS], block, take)
            block += take
            if self._filled == self._rows:
                self.flush()

    def _fill(self, words: torch.Tensor, block: int, take: int) -> None:
        rows = slice(self._filled, self._filled + take)
        start = self._filled * BLOCK_WORDS
        self._flat[start : start + words.numel()].copy_(words)
        self._keys[:, :, rows].copy_(self._block_keys[:, :, block : block + take])
        self._filled += take

    def flush(self) -> None:
        rows = slice(0, self._filled)
        words = self._words[rows].bitwise_and_(MASK32)  # widening int32 copied the sign; words are unsigned
        for lane in range(LANES):
            products = torch.mul(words, self._word_keys[lane], out=self._products[rows])
            sums = products.sum(1, dtype=torch.int64)
            low, high = sums & MASK32, (sums >> 32) & MASK32
            terms = low * self._keys[lane, 0, rows] + high * self._keys[lane, 1, rows]
            self.values[lane, self._done : self._done + self._filled] = terms
        words.zero_()
        self._done += self._filled
        self._filled = 0


def word_keys(device: torch.device) -> torch.Tensor:
    """Level 1's keys, one row per lane."""
    keys = _word_keys.get(device)
    if keys is None:
        keys = torch.stack([_splitmix64(seed, BLOCK_WORDS, device) for seed in WORD_SEEDS])
        _word_keys[device] = _settled(keys)
    return keys


def block_keys(device: torch.device, blocks: int) -> torch.Tensor:
    """Level 2's keys for at least `blocks` blocks, by lane, half and block."""
    keys = _block_keys.get(device)
    if keys is None or keys.shape[2] < blocks:
        count = 1 << max(blocks - 1, 63).bit_length()
        keys = torch.stack([_splitmix64(seed, 2 * count, device).view(count, 2).t() for seed in BLOCK_SEEDS])
        _block_keys[device] = _settled(keys)
    return keys


def _settled(keys: torch.Tensor) -> torch.Tensor:
    """Keys are made on one stream and read on any: waiting once here spares an event at every use."""
    synchronize = getattr(getattr(torch, keys.device.type, None), "synchronize", None)
    if synchronize is not None:
        synchronize()
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
    """Right shift that brings in zeros; torch's own brings in the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _sum_serially(terms: torch.Tensor) -> torch.Tensor:
    if terms.shape[1] == 1:
        return terms[:, 0]
    sums = [terms[:, start:stop].sum(1, dtype=torch.int64) for start, stop in _pieces(terms.shape[1], LANES)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.int64)


def _pieces(count: int, width: int = 1) -> Iterator[tuple[int, int]]:
    size = SERIAL_ELEMENTS // width
    for start in range(0, max(count, 1), size):
        yield start, min(start + size, count)


def _blocks_in(words: torch.Tensor) -> int:
    return -(-words.numel() // BLOCK_WORDS)

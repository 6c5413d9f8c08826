"""The algorithm of the table kernel in numpy: digests as defined, sketches with the same bits as the kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ddpcheck.probes.digest.tensor_bytes import layout_of
from ddpcheck.records.sketch_signs import BLOCK, BLOCK_WORDS, sign_bits, weight
from tests.helpers.multilinear_reference import multilinear_128

TILES = 32
PROGRAM_WORDS = TILES * BLOCK_WORDS

_SIGNS = np.unpackbits(np.frombuffer(sign_bits(), np.uint8), bitorder="little").astype(bool)


def memory_bytes(tensor: torch.Tensor) -> bytes:
    """The dense memory of a tensor on the CPU, in the order of memory."""
    span = torch.empty(0, dtype=torch.uint8)
    offset = tensor.storage_offset() * tensor.element_size()
    span.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))
    return bytes(span.tolist()) if tensor.nbytes < 64 else span.numpy().tobytes()


def digest_of(tensor: torch.Tensor) -> bytes:
    return multilinear_128(memory_bytes(tensor), layout_of(tensor).header)


def sketch_of(tensor: torch.Tensor) -> tuple[float, float, int]:
    """Signed sum, norm and count of non-finite values, with every rounding of the kernel."""
    wide = tensor.dtype is torch.float64
    values = tensor.detach().reshape(-1).to(torch.float64 if wide else torch.float32).numpy()
    per_tile = BLOCK_WORDS * 4 // tensor.element_size()
    with np.errstate(all="ignore"):
        parts = [
            _program(values, start, per_tile, wide, tensor.element_size() == 2)
            for start in range(0, len(values), TILES * per_tile)
        ]
        value = _exact([part[0] for part in parts])
        squares = _exact([part[1] for part in parts])
    return value, math.sqrt(squares) if squares >= 0 else squares, sum(part[2] for part in parts)


def _program(values: Any, start: int, per_tile: int, wide: bool, pairs: bool) -> tuple[float, float, int]:
    chunk = values[start : start + TILES * per_tile]
    magnitudes = np.abs(chunk)
    finite = np.isfinite(chunk)
    most = float(magnitudes.max(initial=0)) if finite.all() else math.inf
    low, high = (2.0**-400, 2.0**400) if wide else (2.0**-40, 2.0**50)
    if most == 0 or low <= most <= high:
        value, squares, _ = _sums(chunk, start, per_tile, wide, pairs)
        return value, squares, 0
    largest = float(magnitudes[finite].max(initial=0))
    smallest_exponent, limit = (-1023, 1000) if wide else (-127, 126)
    exponent = max(math.frexp(largest)[1] - 1, smallest_exponent) if largest else smallest_exponent
    shift = min(max(-exponent, -limit), limit)
    kind = np.float64 if wide else np.float32
    scaled = np.where(finite, chunk * kind(2.0**shift), kind(0)).astype(kind)
    value, squares, _ = _sums(scaled, start, per_tile, wide, pairs)
    nonfinite = int((~finite).sum())
    if nonfinite:
        return math.nan, math.inf, nonfinite
    return value * 2.0**-shift, squares * 2.0**-shift * 2.0**-shift, 0


def _sums(chunk: Any, start: int, per_tile: int, wide: bool, pairs: bool) -> tuple[float, float, float]:
    kind = np.float64 if wide else np.float32
    columns = per_tile // 2 if pairs else per_tile
    tiles = -(-len(chunk) // per_tile)
    padded = np.zeros(tiles * per_tile, kind)
    padded[: len(chunk)] = chunk
    positions = start + np.arange(tiles * per_tile)
    signed = np.where(_SIGNS[positions % BLOCK], padded, -padded)
    first_block = start // BLOCK
    boundary = (first_block + 1) * BLOCK
    sums, errors, squares = (np.zeros(columns, kind) for _ in range(3))
    before: Any = (np.zeros(columns, kind), np.zeros(columns, kind))
    for tile in range(tiles):
        part = slice(tile * per_tile, (tile + 1) * per_tile)
        numbers, terms, offsets = padded[part], signed[part], positions[part]
        if pairs:
            squares = squares + numbers[::2] * numbers[::2]
            squares = squares + numbers[1::2] * numbers[1::2]
            terms, offsets = terms[::2] + terms[1::2], offsets[::2]
        else:
            squares = squares + numbers * numbers
        if offsets[0] <= boundary < start + (tile + 1) * per_tile:
            inside = offsets < boundary
            before = _add(sums, errors, np.where(inside, terms, kind(0)), pairs)
            sums, errors = np.where(inside, kind(0), terms), np.zeros(columns, kind)
        else:
            sums, errors = _add(sums, errors, terms, pairs)
    most = float(np.abs(padded).max())
    exponent = math.frexp(most)[1] - 1 if most else -5000
    exponent = min(max(exponent, -400 if wide else -41), 400 if wide else 50)
    shift = 39 - exponent
    passed = start + tiles * per_tile > boundary
    value = _fixed(*before, shift) * weight(first_block) + _fixed(sums, errors, shift) * weight(
        first_block + passed
    )
    return value, _fixed(squares, squares * 0, 38 - 2 * exponent), most


def _add(sums: Any, errors: Any, terms: Any, pairs: bool) -> tuple[Any, Any]:
    total = sums + terms
    if pairs:
        return total, errors
    added = total - sums
    return total, errors + ((sums - (total - added)) + (terms - added))


def _fixed(sums: Any, errors: Any, shift: int) -> float:
    kind = sums.dtype.type
    scale = kind(2.0**shift)
    whole = (sums * scale).astype(np.int64)
    rest = sums * scale - whole.astype(kind)
    whole_errors = (errors * scale).astype(np.int64)
    rest = rest + (errors * scale - whole_errors.astype(kind))
    fraction = int((rest * kind(2.0**40)).astype(np.int64).sum())
    total = int((whole + whole_errors).sum())
    return (float(total) + float(fraction) * 2.0**-40) * 2.0**-shift


def _exact(numbers: list[float]) -> float:
    bad = [number for number in numbers if not math.isfinite(number)]
    if bad:
        return max(bad, key=math.isnan)
    most = max(map(abs, numbers), default=0.0)
    exponent = math.frexp(most)[1] - 1 if most else -5000
    exponent = min(max(exponent, -970), 1000)
    whole = fraction = 0
    for number in numbers:
        scaled = number * 2.0 ** (39 - exponent)
        whole += int(scaled)
        fraction += int((scaled - int(scaled)) * 2.0**40)
    return (float(whole) + float(fraction) * 2.0**-40) * 2.0 ** (exponent - 39)

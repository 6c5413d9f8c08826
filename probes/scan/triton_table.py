"""Digest, sketch and count of non-finite values of a table of tensors in Triton; imported only if triton is used.

One program reads 128 KB of one tensor once. Sketches use no arithmetic in float64 per element: each column of a
program adds up 32 tiles in float32 and keeps the rounding errors (float64 only for tensors of float64). The columns are
then added as integers, in units of the largest element times 2**-40: the order of additions has no effect, so equal
tensors have equal sketches on every device. A second launch adds up the programs of each tensor.
"""

# Triton evaluates conditions of constants when it compiles, others when it runs: they cannot be merged.
# ruff: noqa: SIM102, SIM108

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ddpcheck.device_api import takes_register_limit, warp_size
from ddpcheck.probes.digest.multilinear_torch import word_keys
from ddpcheck.probes.scan.device_kernels import MAX_DIMS, KernelTable, Kind, ResultField, RowField
from ddpcheck.records.sketch_signs import (
    BLOCK,
    BLOCK_SEEDS,
    BLOCK_WORDS,
    GAMMA,
    MIX_1,
    MIX_2,
    WEIGHT_SEED,
    sign_bits,
)

# A program reads TILES blocks of the digest.
TILES = 32
# Programs that the second launch adds up at once.
AT_ONCE = 128
COLUMNS = len(ResultField)
# Four words per thread and tile, which are one load of 128 bits: with more of them a thread needs more registers, so
# fewer programs run at a time.
THREADS = BLOCK_WORDS // 4
# On NVIDIA GPUs three programs then fit on a multiprocessor instead of two, and no register is spilled.
MOST_REGISTERS = 80
ALL_KINDS = sum(1 << kind for kind in Kind)

_WORDS = tl.constexpr(BLOCK_WORDS)
_TILES = tl.constexpr(TILES)
_FIELDS = tl.constexpr(len(RowField))
_COLUMNS = tl.constexpr(COLUMNS)
_BLOCK = tl.constexpr(BLOCK)
_DIMS = tl.constexpr(MAX_DIMS)
_GAMMA = tl.constexpr(GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_SEED_0 = tl.constexpr(BLOCK_SEEDS[0])
_SEED_1 = tl.constexpr(BLOCK_SEEDS[1])
_WEIGHT_SEED = tl.constexpr(WEIGHT_SEED)
_FLOAT32 = tl.constexpr(int(Kind.FLOAT32))
_BFLOAT16 = tl.constexpr(int(Kind.BFLOAT16))
_FLOAT16 = tl.constexpr(int(Kind.FLOAT16))
_FLOAT64 = tl.constexpr(int(Kind.FLOAT64))
_BYTES = tl.constexpr(int(Kind.BYTES))


@triton.jit
def _mix(seed, index):  # type: ignore[no-untyped-def]
    """Output number `index` of splitmix64."""
    z = seed + (index + 1) * _GAMMA
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _weight(block):  # type: ignore[no-untyped-def]
    """The weight of a block of the sketch."""
    bits = _mix(_WEIGHT_SEED, block.to(tl.uint64))
    magnitude = 0.5 + (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
    signed = tl.where((bits & 1) != 0, magnitude, -magnitude)
    return tl.where(block == 0, magnitude * 0 + 1.0, signed)


@triton.jit  # type: ignore[untyped-decorator]
def _lane(sums, blocks, SEED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Level 2 of the digest: one lane, from the sums of all blocks of a program."""
    low = _mix(SEED, 2 * blocks) * (sums & 0xFFFFFFFF)
    high = _mix(SEED, 2 * blocks + 1) * (sums >> 32)
    return tl.sum((low + high).to(tl.int64), axis=0)


@triton.jit
def _memory_index(order, index):  # type: ignore[no-untyped-def]
    """The position in memory of element `index` in row-major order."""
    dims = tl.load(order).to(tl.int32)
    offset = index * 0
    for number in range(dims):
        dim = dims - 1 - number
        size = tl.load(order + 1 + dim)
        stride = tl.load(order + 1 + _DIMS + dim)
        offset += (index % size) * stride
        index = index // size
    return offset


@triton.jit  # type: ignore[untyped-decorator]
def _halves(data, order, first, elements, ORDERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of words, each of two elements of 16 bits, at any address that is a multiple of two."""
    pointer = data.to(tl.pointer_type(tl.uint16))
    first_of_pair = 2 * (first + tl.arange(0, _WORDS))
    second = first_of_pair + 1
    at_first, at_second = first_of_pair, second
    if ORDERED:
        at_first = _memory_index(order, first_of_pair)
        at_second = _memory_index(order, second)
    low = tl.load(pointer + at_first, mask=first_of_pair < elements, other=0).to(tl.uint32)
    high = tl.load(pointer + at_second, mask=second < elements, other=0).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def _four_bytes(data, first, nbytes):  # type: ignore[no-untyped-def]
    """A tile of words at any address."""
    pointer = data.to(tl.pointer_type(tl.uint8))
    start = 4 * (first + tl.arange(0, _WORDS))
    words = tl.load(pointer + start, mask=start < nbytes, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        offset = start + byte
        words |= tl.load(pointer + offset, mask=offset < nbytes, other=0).to(tl.uint32) << (8 * byte)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _tile(data, order, first, nbytes, KIND: tl.constexpr, ORDERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """1024 words from word `first` on, zeros past the end; of float64, 512 double words."""
    WIDE: tl.constexpr = KIND == _FLOAT64
    pointer = data.to(tl.pointer_type(tl.uint64 if WIDE else tl.uint32))
    offset = (first // 2 if WIDE else first) + tl.arange(0, _WORDS // 2 if WIDE else _WORDS)
    inside = offset < nbytes // (8 if WIDE else 4)
    if ORDERED:
        if KIND == _FLOAT32 or WIDE:
            words = tl.load(pointer + _memory_index(order, offset), mask=inside, other=0)
        else:
            words = _halves(data, order, first, nbytes // 2, True)
    else:
        # Without a mask, and with a known alignment, these are loads of 128 bits.
        if (data % 16 == 0) & ((first + _WORDS) * 4 <= nbytes):
            words = tl.load(tl.multiple_of(pointer, 16) + offset)
        else:
            if KIND == _FLOAT32 or WIDE:
                words = tl.load(pointer + offset, mask=inside, other=0)
            elif KIND == _BYTES:
                words = _four_bytes(data, first, nbytes)
            else:
                words = _halves(data, order, first, nbytes // 2, False)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _as_float(bits, KIND: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a tile, as bits of float32 (float64: of float64)."""
    if KIND == _BFLOAT16:
        result = bits & 0xFFFF0000 if HIGH else bits << 16
    elif KIND == _FLOAT16:
        half = (bits >> 16 if HIGH else bits & 0xFFFF).to(tl.uint16)
        result = half.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    else:
        result = bits
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _negated(bits, signs, offset, KIND: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements with the signs of the sketch. `offset`: of the tile in its block, a multiple of 256."""
    if KIND == _FLOAT64:
        column = tl.arange(0, _WORDS // 2)
        words = tl.load(signs + (offset >> 5) + (column >> 5)).to(tl.uint64)
        flips = (words << (32 + (column & 31)).to(tl.uint64)) & 0x8000000000000000
        values = (bits ^ flips).to(tl.float64, bitcast=True)
    else:
        if KIND == _FLOAT32:
            column = tl.arange(0, _WORDS)
        else:
            column = 2 * tl.arange(0, _WORDS) + (1 if HIGH else 0)
        words = tl.load(signs + (offset >> 5) + (column >> 5))
        flips = (words << (column & 31).to(tl.uint32)) & 0x80000000
        values = (bits ^ flips).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _fixed(sums, errors, scale):  # type: ignore[no-untyped-def]
    """The sum of all columns: as integers, so that their order has no effect."""
    whole = (sums * scale).to(tl.int64)
    rest = sums * scale - whole.to(sums.dtype)
    whole_errors = (errors * scale).to(tl.int64)
    rest += errors * scale - whole_errors.to(sums.dtype)
    fraction = tl.sum((rest * 1099511627776.0).to(tl.int64), axis=0)
    total = tl.sum(whole + whole_errors, axis=0)
    return total.to(tl.float64) + fraction.to(tl.float64) * 9.094947017729282e-13


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    """2**exponent in float64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _power_of(exponent, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDE:
        power = _power(exponent)
    else:
        power = ((exponent + 127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return power


@triton.jit  # type: ignore[untyped-decorator]
def _abs_bits(bits, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ordered like the magnitudes; infinities and NaN are the largest."""
    if WIDE:
        magnitude = (bits & 0x7FFFFFFFFFFFFFFF).to(tl.int64)
    else:
        magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    return magnitude


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(bits, scale, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements times a power of two, as bits; 0 for those that are not finite."""
    if WIDE:
        values = bits.to(tl.float64, bitcast=True) * scale
        finite = _abs_bits(bits, True) < 0x7FF0000000000000
        result = tl.where(finite, values, 0.0).to(tl.uint64, bitcast=True)
    else:
        values = bits.to(tl.float32, bitcast=True) * scale
        finite = _abs_bits(bits, False) < 0x7F800000
        result = tl.where(finite, values, 0.0).to(tl.uint32, bitcast=True)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _add(sums, errors, values, COMPENSATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums with `values`, and their rounding errors (Knuth's TwoSum)."""
    total = sums + values
    if COMPENSATED:
        added = total - sums
        errors += (sums - (total - added)) + (values - added)
    return total, errors


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    data,
    nbytes,
    order,
    start,
    keys,
    signs,
    digest,
    sketch,
    scale,
    KIND: tl.constexpr,
    ORDERED: tl.constexpr,
    RESCALED: tl.constexpr,
    DIGESTED: tl.constexpr,
):
    """One pass over the words of a program: lanes of the digest, signed sum and sum of squares, largest magnitude."""
    WIDE: tl.constexpr = KIND == _FLOAT64
    PAIRS: tl.constexpr = (KIND == _BFLOAT16) | (KIND == _FLOAT16)
    LANES: tl.constexpr = _WORDS // 2 if WIDE else _WORDS
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32
    column = tl.arange(0, LANES)
    tile_index = tl.arange(0, _TILES)
    block_sums_0 = tl.zeros([_TILES], dtype=tl.uint64)
    block_sums_1 = tl.zeros([_TILES], dtype=tl.uint64)
    sums = tl.zeros([LANES], dtype=FLOAT)
    errors = tl.zeros([LANES], dtype=FLOAT)
    sums_before = tl.zeros([LANES], dtype=FLOAT)
    errors_before = tl.zeros([LANES], dtype=FLOAT)
    squares = tl.zeros([LANES], dtype=FLOAT)
    largest = tl.zeros([LANES], dtype=tl.int64 if WIDE else tl.int32)
    if DIGESTED:
        if WIDE:
            keys_0 = tl.load(keys + 2 * column)
            keys_1 = tl.load(keys + _WORDS + 2 * column)
            odd_keys_0 = tl.load(keys + 2 * column + 1)
            odd_keys_1 = tl.load(keys + _WORDS + 2 * column + 1)
        else:
            keys_0 = tl.load(keys + column)
            keys_1 = tl.load(keys + _WORDS + column)
    # In elements: where the program begins, and where the next block of the sketch does.
    begin = start // 2 if WIDE else (start * 2 if PAIRS else start)
    size: tl.constexpr = _WORDS // 2 if WIDE else (_WORDS * 2 if PAIRS else _WORDS)
    block = begin // _BLOCK
    boundary = (block + 1) * _BLOCK
    tiles = tl.minimum((nbytes - start * 4 + (4 * _WORDS - 1)) // (4 * _WORDS), _TILES).to(tl.int32)
    for tile in range(tiles):
        bits = _tile(data, order, start + tile * _WORDS, nbytes, KIND, ORDERED)
        if DIGESTED:
            if digest:
                if WIDE:
                    low, high = bits & 0xFFFFFFFF, bits >> 32
                    sum_0 = tl.sum(low * keys_0 + high * odd_keys_0, axis=0)
                    sum_1 = tl.sum(low * keys_1 + high * odd_keys_1, axis=0)
                else:
                    wide = bits.to(tl.uint64)
                    sum_0 = tl.sum(wide * keys_0, axis=0)
                    sum_1 = tl.sum(wide * keys_1, axis=0)
                block_sums_0 = tl.where(tile_index == tile, sum_0, block_sums_0)
                block_sums_1 = tl.where(tile_index == tile, sum_1, block_sums_1)
        if KIND != _BYTES:
            if sketch:
                first = begin + tile * size
                # The table of signs goes on after its end: a program reads into the next block.
                offset = (first - block * _BLOCK).to(tl.int32)
                low = _as_float(bits, KIND, False)
                if RESCALED:
                    low = _scaled(low, scale, WIDE)
                largest = tl.maximum(largest, _abs_bits(low, WIDE))
                number = low.to(FLOAT, bitcast=True)
                squares += number * number
                values = _negated(low, signs, offset, KIND, False)
                if PAIRS:
                    high = _as_float(bits, KIND, True)
                    if RESCALED:
                        high = _scaled(high, scale, WIDE)
                    largest = tl.maximum(largest, _abs_bits(high, WIDE))
                    number = high.to(FLOAT, bitcast=True)
                    squares += number * number
                    values += _negated(high, signs, offset, KIND, True)
                if (first <= boundary) & (boundary < first + size):
                    # Both elements of a word are in the same block: blocks have an first_of_pair size.
                    inside = (first + (2 * column if PAIRS else column)) < boundary
                    sums_before, errors_before = _add(sums, errors, tl.where(inside, values, 0.0), not PAIRS)
                    sums = tl.where(inside, 0.0, values)
                    errors = errors * 0
                else:
                    sums, errors = _add(sums, errors, values, not PAIRS)
    lane_0 = tl.zeros([], dtype=tl.int64)
    lane_1 = tl.zeros([], dtype=tl.int64)
    if DIGESTED:
        blocks = (start // _WORDS + tile_index).to(tl.uint64)
        lane_0 = _lane(block_sums_0, blocks, _SEED_0)
        lane_1 = _lane(block_sums_1, blocks, _SEED_1)
    value = tl.zeros([], dtype=tl.float64)
    total = tl.zeros([], dtype=tl.float64)
    most = tl.zeros([], dtype=tl.int64)
    if KIND != _BYTES:
        if sketch:
            most = tl.max(largest, axis=0).to(tl.int64)
            exponent = (most >> 52) - 1023 if WIDE else (most >> 23) - 127
            # Outside this range, where squares would overflow or vanish, the result is not used.
            exponent = tl.minimum(tl.maximum(exponent, -400 if WIDE else -41), 400 if WIDE else 50)
            shift = 39 - exponent
            unit = _power_of(shift, WIDE)
            before = _fixed(sums_before, errors_before, unit) * _power(-shift)
            now = _fixed(sums, errors, unit) * _power(-shift)
            passed = begin + tiles * size > boundary
            value = before * _weight(block) + now * _weight(block + tl.where(passed, 1, 0))
            shift = 38 - 2 * exponent
            total = _fixed(squares, squares * 0, _power_of(shift, WIDE)) * _power(-shift)
    return lane_0, lane_1, value, total, most


@triton.jit  # type: ignore[untyped-decorator]
def _survey(data, nbytes, order, start, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude that is finite, as bits, and the number of values that are not."""
    WIDE: tl.constexpr = KIND == _FLOAT64
    PAIRS: tl.constexpr = (KIND == _BFLOAT16) | (KIND == _FLOAT16)
    LANES: tl.constexpr = _WORDS // 2 if WIDE else _WORDS
    INTEGER: tl.constexpr = tl.int64 if WIDE else tl.int32
    LIMIT: tl.constexpr = 0x7FF0000000000000 if WIDE else 0x7F800000
    largest = tl.zeros([LANES], dtype=INTEGER)
    counts = tl.zeros([LANES], dtype=tl.int32)
    tiles = tl.minimum((nbytes - start * 4 + (4 * _WORDS - 1)) // (4 * _WORDS), _TILES).to(tl.int32)
    for tile in range(tiles):
        # In the order of memory: neither result depends on it.
        bits = _tile(data, order, start + tile * _WORDS, nbytes, KIND, False)
        low = _abs_bits(_as_float(bits, KIND, False), WIDE)
        largest = tl.maximum(largest, tl.where(low < LIMIT, low, 0))
        counts += (low >= LIMIT).to(tl.int32)
        if PAIRS:
            high = _abs_bits(_as_float(bits, KIND, True), WIDE)
            largest = tl.maximum(largest, tl.where(high < LIMIT, high, 0))
            counts += (high >= LIMIT).to(tl.int32)
    return tl.max(largest, axis=0), tl.sum(counts, axis=0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _program(  # type: ignore[no-untyped-def]
    data, nbytes, order, ordered, start, keys, signs, work, output, KIND: tl.constexpr, ORDERS: tl.constexpr
):
    """Reads the words of one program and writes its part of the results."""
    WIDE: tl.constexpr = KIND == _FLOAT64
    digest = (work & 1) != 0
    sketch = (work & 6) != 0
    scale = 1.0
    lane_0, lane_1, value, squares, most = _read(
        data,
        nbytes,
        order,
        start,
        keys,
        signs,
        digest,
        sketch & (ordered == 0),
        scale,
        KIND,
        False,
        False,
        True,
    )
    nonfinite = tl.zeros([], dtype=tl.int64)
    if KIND != _BYTES:
        if ORDERS:
            if sketch & (ordered != 0):
                _, _, value, squares, most = _read(
                    data, nbytes, order, start, keys, signs, False, True, scale, KIND, True, False, False
                )
        low_limit = 0x26F0000000000000 if WIDE else 0x2B800000
        high_limit = 0x58F0000000000000 if WIDE else 0x58800000
        if sketch & (most != 0) & ((most < low_limit) | (most > high_limit)):
            # Values that are not finite, or whose squares would overflow or vanish: rare, so they are read again.
            largest, nonfinite = _survey(data, nbytes, order, start, KIND)
            if WIDE:
                shift = tl.minimum(tl.maximum(1023 - (largest >> 52), -1000), 1000).to(tl.int64)
            else:
                shift = tl.minimum(tl.maximum(127 - (largest >> 23), -126), 126).to(tl.int64)
            factor = _power_of(shift, WIDE)
            _, _, value, squares, _most = _read(
                data, nbytes, order, start, keys, signs, False, ordered == 0, factor, KIND, False, True, False
            )
            if ORDERS:
                if ordered != 0:
                    _, _, value, squares, _most = _read(
                        data, nbytes, order, start, keys, signs, False, True, factor, KIND, True, True, False
                    )
            value = value * _power(-shift)
            squares = squares * _power(-shift) * _power(-shift)
            if nonfinite != 0:
                value = value * 0 + float("nan")
                squares = squares * 0 + float("inf")
    tl.store(output, lane_0)
    tl.store(output + 1, lane_1)
    tl.store(output + 2, value.to(tl.int64, bitcast=True))
    tl.store(output + 3, squares.to(tl.int64, bitcast=True))
    tl.store(output + 4, nonfinite)


@triton.jit  # type: ignore[untyped-decorator]
def scan_programs(  # type: ignore[no-untyped-def]
    rows, addresses, orders, programs, keys, signs, parts, KINDS: tl.constexpr, ORDERS: tl.constexpr
):
    """KINDS: a bit for each kind of row that the table may have. ORDERS: whether a row may have another order."""
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(programs + program).to(tl.int64)
    row = rows + index * _FIELDS
    data = tl.load(addresses + index)
    nbytes = tl.load(row)
    kind = tl.load(row + 1)
    work = tl.load(row + 2)
    start = (program - tl.load(row + 3)) * (_TILES * _WORDS)
    number = tl.load(row + 6)
    order = orders + tl.maximum(number, 0) * (1 + 2 * _DIMS)
    ordered = (number >= 0).to(tl.int32)
    output = parts + program * _COLUMNS
    if KINDS & 2:
        if kind == 1:
            _program(data, nbytes, order, ordered, start, keys, signs, work, output, _FLOAT32, ORDERS)
    if KINDS & 4:
        if kind == 2:
            _program(data, nbytes, order, ordered, start, keys, signs, work, output, _BFLOAT16, ORDERS)
    if KINDS & 8:
        if kind == 3:
            _program(data, nbytes, order, ordered, start, keys, signs, work, output, _FLOAT16, ORDERS)
    if KINDS & 16:
        if kind == 4:
            _program(data, nbytes, order, ordered, start, keys, signs, work, output, _FLOAT64, ORDERS)
    if KINDS & 1:
        if kind == 0:
            _program(data, nbytes, order, ordered, start, keys, signs, work, output, _BYTES, ORDERS)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_sum(parts, first, count, column, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a column of float64 in fixed point: the order of additions has no effect."""
    lanes = tl.arange(0, AT_ONCE)
    largest = tl.zeros([AT_ONCE], dtype=tl.int64)
    for begin in range(0, count, AT_ONCE):
        offset = parts + (first + begin + lanes) * _COLUMNS + column
        bits = tl.load(offset, mask=begin + lanes < count, other=0)
        largest = tl.maximum(largest, bits & 0x7FFFFFFFFFFFFFFF)
    most = tl.max(largest, axis=0)
    exponent = tl.minimum(tl.maximum((most >> 52) - 1023, -970), 1000)
    scale = _power(39 - exponent)
    whole = tl.zeros([AT_ONCE], dtype=tl.int64)
    rest = tl.zeros([AT_ONCE], dtype=tl.int64)
    for begin in range(0, count, AT_ONCE):
        offset = parts + (first + begin + lanes) * _COLUMNS + column
        bits = tl.load(offset, mask=begin + lanes < count, other=0)
        # The sum of values that are not finite is written below.
        bits = tl.where((bits & 0x7FFFFFFFFFFFFFFF) < 0x7FF0000000000000, bits, 0)
        number = bits.to(tl.float64, bitcast=True) * scale
        part = number.to(tl.int64)
        whole += part
        rest += ((number - part.to(tl.float64)) * 1099511627776.0).to(tl.int64)
    fraction = tl.sum(rest, axis=0).to(tl.float64) * 9.094947017729282e-13
    total = (tl.sum(whole, axis=0).to(tl.float64) + fraction) * _power(exponent - 39)
    return tl.where(most < 0x7FF0000000000000, total, most.to(tl.float64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def add_programs(rows, parts, results, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per tensor: adds up its parts, and completes the digest."""
    index = tl.program_id(0).to(tl.int64)
    row = rows + index * _FIELDS
    work = tl.load(row + 2)
    first = tl.load(row + 3)
    nbytes = tl.load(row)
    count = tl.where(work == 0, 0, (nbytes + (4 * _TILES * _WORDS - 1)) // (4 * _TILES * _WORDS)).to(tl.int32)
    lanes = tl.arange(0, AT_ONCE)
    lane_0 = tl.zeros([AT_ONCE], dtype=tl.int64)
    lane_1 = tl.zeros([AT_ONCE], dtype=tl.int64)
    nonfinite = tl.zeros([AT_ONCE], dtype=tl.int64)
    for begin in range(0, count, AT_ONCE):
        offset = parts + (first + begin + lanes) * _COLUMNS
        inside = begin + lanes < count
        lane_0 += tl.load(offset, mask=inside, other=0)
        lane_1 += tl.load(offset + 1, mask=inside, other=0)
        nonfinite += tl.load(offset + 4, mask=inside, other=0)
    digested = (work & 1) != 0
    output = results + index * _COLUMNS
    zero = work * 0
    tl.store(output, tl.where(digested, tl.sum(lane_0, axis=0) + tl.load(row + 4), zero))
    tl.store(output + 1, tl.where(digested, tl.sum(lane_1, axis=0) + tl.load(row + 5), zero))
    tl.store(output + 2, _exact_sum(parts, first, count, 2, AT_ONCE).to(tl.int64, bitcast=True))
    tl.store(output + 3, _exact_sum(parts, first, count, 3, AT_ONCE).to(tl.int64, bitcast=True))
    tl.store(output + 4, tl.sum(nonfinite, axis=0))


@functools.cache
def sign_words(device: torch.device) -> torch.Tensor:
    """The signs as bits of int32, the first one highest, set for -1; longer than a block by what a program reads."""
    packed = sign_bits()
    packed += packed[: 4 * TILES * BLOCK_WORDS]
    flipped = bytes(0xFF ^ int(f"{byte:08b}"[::-1], 2) for byte in packed)
    words = [int.from_bytes(flipped[offset : offset + 4], "big") for offset in range(0, len(flipped), 4)]
    with torch.inference_mode(False):
        host = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32, device="cpu")
        return host.to(device)


class TritonKernel:
    """One launch for all tensors of a device, and a small one that adds up the parts of each."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._options = {"maxnreg": MOST_REGISTERS} if takes_register_limit(device) else {}
        self._warps = THREADS // warp_size(device)
        self._keys = word_keys(device)
        self._signs = sign_words(device)

    def launch(self, table: KernelTable) -> torch.Tensor:
        count, programs = table.rows.shape[0], table.programs.shape[0]
        device = table.rows.device
        results = torch.empty((count, COLUMNS), dtype=torch.int64, device=device)
        parts = torch.empty((max(programs, 1), COLUMNS), dtype=torch.int64, device=device)
        if programs:
            scan_programs[(programs,)](
                table.rows,
                table.addresses,
                table.orders,
                table.programs,
                self._keys,
                self._signs,
                parts,
                KINDS=ALL_KINDS,
                ORDERS=table.orders.shape[0] > 1,
                num_warps=self._warps,
                enable_fp_fusion=False,
                **self._options,
            )
        add_programs[(count,)](table.rows, parts, results, AT_ONCE=AT_ONCE, enable_fp_fusion=False)
        return results

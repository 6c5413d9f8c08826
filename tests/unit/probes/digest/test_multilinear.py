"""multilinear-128: the torch version matches the plain-Python definition bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.protocol import describe, header_of
from ddpcheck.records import sketch_signs
from tests.helpers import multilinear_reference as reference

BLOCK_BYTES = 4 * sketch_signs.BLOCK_WORDS
SIZES = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    4095,
    4096,
    4097,
    3 * BLOCK_BYTES - 2,
    31 * BLOCK_BYTES,
    31 * BLOCK_BYTES + 9,
]
DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
]


def noise(count: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(count)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def expected(tensor: torch.Tensor, data: bytes) -> bytes:
    return reference.multilinear_128(data, header_of(describe(tensor.dtype, tensor.shape, tensor.stride())))


def test_splitmix64_gives_the_published_values() -> None:
    outputs = [sketch_signs.splitmix64(1234567, index) for index in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_definition_written_out_for_one_small_input() -> None:
    header = bytes(range(16))
    lanes = []
    for lane in range(2):
        total = sketch_signs.word_key(lane, 0) * 0x04030201 + sketch_signs.word_key(lane, 1) * 0x00000005
        total %= 2**64
        hashed = sketch_signs.block_key(lane, 0) * (total % 2**32) + sketch_signs.block_key(lane, 1) * (
            total // 2**32
        )
        start = int.from_bytes(header[8 * lane : 8 * lane + 8], "little")
        lanes.append(((hashed + start) % 2**64).to_bytes(8, "little"))
    assert reference.multilinear_128(bytes([1, 2, 3, 4, 5]), header) == b"".join(lanes)


def test_no_word_key_lets_a_change_of_one_word_vanish() -> None:
    # One word's difference has at most 31 trailing zero bits: with fewer than 33 in the key, no product is 0.
    drawn = {
        sketch_signs.word_key(lane, index) for lane in range(2) for index in range(sketch_signs.BLOCK_WORDS)
    }
    assert len(drawn) == 2 * sketch_signs.BLOCK_WORDS
    assert all(key % 2**33 for key in drawn)


@pytest.mark.parametrize("size", SIZES)
def test_torch_agrees_with_the_reference_for_every_size(size: int) -> None:
    data = noise(size)
    tensor = tensor_of(data)
    assert MultilinearDigester().submit([tensor]).result() == [expected(tensor, data)]


def test_torch_agrees_with_the_reference_for_many_tensors_in_one_submission() -> None:
    pieces = [noise(size, seed=size) for size in [*SIZES, *range(20)]]
    tensors = [tensor_of(piece) for piece in pieces]
    leaves = MultilinearDigester().submit(tensors).result()
    assert leaves == [expected(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_torch_agrees_with_the_reference_for_every_dtype_and_offset(dtype: torch.dtype, skipped: int) -> None:
    data = noise(101 * dtype.itemsize)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)[skipped:]
    leaf = MultilinearDigester().submit([tensor]).result()
    assert leaf == [expected(tensor, data[skipped * dtype.itemsize :])]


def test_torch_agrees_at_an_address_that_is_no_multiple_of_four() -> None:
    data = noise(9001)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=1)
    assert MultilinearDigester().submit([tensor]).result() == [expected(tensor, data[1:])]

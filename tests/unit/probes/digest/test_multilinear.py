"""multilinear-128: the torch and Triton versions match the plain-Python definition bit by bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from ddpcheck.probes.digest.multilinear import MultilinearDigester
from ddpcheck.probes.digest.protocol import describe, header_of
from ddpcheck.records import sketch_signs
from tests.helpers import multilinear_reference as reference
from tests.helpers.paths import ROOT

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


TRITON_SCRIPT = """
import contextlib, json, sys, types
import torch
from ddpcheck.probes.digest import triton_kernel, triton_launch
from ddpcheck.probes.digest.protocol import describe, finish_leaf, header_of

# The CUDA calls around the launch, stood in for: the interpreter works on CPU memory.
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
torch.Tensor.pin_memory = lambda tensor: tensor

tensors = []
for text, offset in json.load(sys.stdin):
    data = bytearray.fromhex(text)
    whole = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensors.append(whole[offset:])
hash_all = triton_launch.FusedHash(triton_kernel, torch.device("cpu"))
first = hash_all.lanes(tensors).tolist()
assert hash_all.lanes(tensors).tolist() == first
headers = [header_of(describe(t.dtype, t.shape, t.stride())) for t in tensors]
leaves = [finish_leaf(header, lanes).hex() for header, lanes in zip(headers, first)]
checked = triton_launch.fused_hash(torch.device("cpu")) is not None
triton_kernel.launch = lambda table, tensors: torch.ones((tensors, 2), dtype=torch.int64)
json.dump([leaves, checked, triton_launch.fused_hash(torch.device("cpu")) is None], sys.stdout)
"""


def test_triton_agrees_with_the_reference_and_is_dropped_where_it_does_not() -> None:
    pytest.importorskip("triton")
    many_programs = 33 * BLOCK_BYTES + 12
    cases = [(noise(size, seed=size), 0) for size in [0, 1, 4, 6, 4096, 4100, many_programs]]
    cases += [(noise(4101, seed=1), 1), (noise(4104, seed=2), 2), (noise(4104, seed=3), 4)]
    root = str(ROOT)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRITON_SCRIPT],
        input=json.dumps([(data.hex(), offset) for data, offset in cases]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    leaves, trusted_when_right, dropped_when_wrong = json.loads(done.stdout)
    samples = [(tensor_of(data)[offset:], data[offset:]) for data, offset in cases]
    assert leaves == [expected(tensor, data).hex() for tensor, data in samples]
    assert trusted_when_right
    assert dropped_when_wrong

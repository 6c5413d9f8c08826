"""Samples: the first values as people read them, and rewrites noticed without reading everything."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddpcheck.analysis.tensor_values import value
from ddpcheck.probes.write_detection import FIRST, TensorSampler, TensorSamples
from ddpcheck.records.digest_codec import unpack_samples
from tests.helpers.unreadable_tensors import UNREADABLE, wrapper


def take(*tensors: torch.Tensor) -> TensorSamples:
    return TensorSampler().take(tensors)


def first(tensor: torch.Tensor) -> bytes:
    (mark,) = take(tensor).first
    return mark


def test_the_first_values() -> None:
    assert first(torch.arange(20.0)) == struct.pack("<8f", *range(8))
    assert first(torch.arange(6.0).view(2, 3)) == struct.pack("<6f", *range(6))
    assert first(nn.Parameter(torch.tensor([1.5, 2.5]))) == struct.pack("<2f", 1.5, 2.5)


def test_a_scalar_and_nothing_at_all() -> None:
    assert first(torch.tensor(3.0)) == struct.pack("<f", 3.0)
    assert first(torch.tensor(7)) == struct.pack("<q", 7)
    assert first(torch.zeros(0)) == b""
    assert first(torch.zeros(3, 0)) == b""


def test_bfloat16_can_be_read_back() -> None:
    data = first(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    assert [value(data[at : at + 2], "bfloat16") for at in (0, 2, 4)] == [1.0, -2.0, 0.5]


def test_values_in_another_order_than_memory_are_not_shown_as_the_first_ones() -> None:
    assert first(torch.arange(6.0).view(2, 3).t()) == b""
    assert first(torch.arange(20.0)[::2]) == b""
    assert first(torch.arange(20.0)[4:]) == struct.pack("<8f", *range(4, 12))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(4).as_subclass(type("Theirs", (torch.Tensor,), {})),
    ],
    ids=["meta", "sparse", "subclass"],
)
def test_what_cannot_be_read_gives_nothing(tensor: torch.Tensor) -> None:
    assert first(tensor) == b""


@pytest.mark.parametrize("make", [*UNREADABLE, wrapper])
def test_what_has_no_memory_is_left_alone(make: Callable[[], torch.Tensor]) -> None:
    assert first(make()) == b""


def test_memory_that_is_given_back_between_two_looks() -> None:
    """As offloading does it: the view keeps an address, and nothing is there."""
    whole = torch.ones(100)
    view, sampler = whole[50:], TensorSampler()
    assert sampler.take([view]).first[0]
    whole.untyped_storage().resize_(0)
    assert sampler.take([view]).first == [b""]


def test_samples_are_packed_as_records_hold_them() -> None:
    import base64

    packed = take(torch.arange(20.0), torch.zeros(0), torch.tensor(True)).packed()
    assert unpack_samples(base64.b64encode(packed).decode()) == [struct.pack("<8f", *range(8)), b"", b"\x01"]


def test_marks_stay_the_same_as_long_as_nobody_writes() -> None:
    tensors = [torch.randn(50), torch.randn(3, 4).t(), torch.tensor(1.0)]
    sampler = TensorSampler()
    assert sampler.take(tensors) == sampler.take(tensors)


@pytest.mark.parametrize("shape", [(1000,), (3,), ()])
def test_every_write_that_autograd_sees_is_noticed(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    sampler = TensorSampler()
    before = sampler.take([parameter])
    with torch.no_grad():
        parameter.view(-1)[-1].fill_(1.0)
    assert sampler.take([parameter]) != before


@pytest.mark.parametrize("size", [1, 8, 15, 16, 1000])
@pytest.mark.parametrize("write", ["whole", "elsewhere"])
def test_writes_through_data_are_noticed(size: int, write: str) -> None:
    parameter = nn.Parameter(torch.ones(size))
    sampler = TensorSampler()
    before = sampler.take([parameter])
    if write == "whole":
        parameter.data.mul_(0.5)
    else:
        parameter.data = torch.zeros(size)
    assert sampler.take([parameter]) != before


def test_a_list_that_grew_is_another_one() -> None:
    sampler = TensorSampler()
    one, two = torch.ones(4), torch.ones(4)
    assert sampler.take([one]) != sampler.take([one, two])


def test_tensors_made_in_inference_mode_have_no_versions() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
    assert take(tensor).versions == [0]


def test_a_sampler_holds_little() -> None:
    marks = take(torch.zeros(1 << 20))
    assert len(marks.first[0]) == FIRST
    assert len(marks.middle[0]) <= FIRST


def test_a_smaller_tensor_at_the_same_address_is_not_read_past_its_end() -> None:
    """Where the larger one was there may be no memory any more."""
    program = """
import ctypes, mmap, torch
from ddpcheck.probes.write_detection import TensorSampler

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
page = mmap.PAGESIZE
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
at = libc.mmap(None, 16 * page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)

def tensor(size):
    return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.float32)

parameter = torch.nn.Parameter(tensor(16 * page))
sampler = TensorSampler()
sampler.take([parameter])
parameter.data = tensor(page)
libc.munmap(at + page, 15 * page)
sampler.take([parameter])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

"""Decoding of tensor bytes, and indices of differing elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.analysis.tensor_values import differing_elements, element_size, unravel_index, value


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_values_match_torch(dtype: str) -> None:
    tensor = torch.tensor([0, 1, 3]).to(getattr(torch, dtype))
    data = bytes(tensor.view(torch.uint8).tolist())
    size = element_size(dtype)
    assert size == tensor.element_size()
    assert [value(data[at : at + size], dtype) for at in range(0, len(data), size)] == tensor.tolist()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_text(dtype: str) -> None:
    tensor = torch.tensor([1.5 - 2j], dtype=getattr(torch, dtype))
    data = bytes(torch.view_as_real(tensor).view(torch.uint8).flatten().tolist())
    assert (value(data, dtype), element_size(dtype)) == ("(1.5-2j)", tensor.element_size())


def test_unsupported_dtypes_are_hexadecimal() -> None:
    assert value(b"\x12", "float8_e4m3fn") == "0x12"
    assert value(b"\x34\x12", "uint16") == "0x1234"
    assert math.isnan(value(b"\x00\x00\xc0\x7f", "float32"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.sampled_from([1, 2, 4, 8]))
def test_differing_elements_are_found(pairs: list[tuple[int, int]], size: int) -> None:
    one = b"".join(a.to_bytes(size, "little") for a, _ in pairs)
    two = b"".join(b.to_bytes(size, "little") for _, b in pairs)
    expected = [index for index, (a, b) in enumerate(pairs) if a != b]
    assert differing_elements(one, two, size, 3) == (len(expected), expected[:3])


def test_differing_elements_far_apart() -> None:
    one = bytearray(4 * 100_000)
    two = bytearray(one)
    two[4 * 99_999] = 1
    two[4 * 8191 + 3] = 1
    assert differing_elements(bytes(one), bytes(two), 4, 5) == (2, [8191, 99_999])


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_an_index_matches_torch(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    index = data.draw(st.integers(0, total - 1))
    tensor = torch.arange(total).view(shape)
    assert tensor[tuple(unravel_index(index, shape))].item() == index

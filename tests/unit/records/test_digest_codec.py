"""Packed leaves and samples."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.records.codecs import unpack_leaves, unpack_samples


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@given(
    st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.binary(min_size=n, max_size=n))))
)
def test_leaves_are_unpacked(case: tuple[int, list[bytes]]) -> None:
    width, leaves = case
    assert unpack_leaves(text(b"".join(leaves)), width) == leaves


@given(st.lists(st.binary(max_size=255)))
def test_samples_are_unpacked(samples: list[bytes]) -> None:
    assert unpack_samples(text(b"".join(bytes((len(s),)) + s for s in samples))) == samples


@pytest.mark.parametrize(
    ("packed", "width"), [("AAAA", 2), ("AAAA", 0), ("AAAA", -1), ("!", 1), ("AAA", 1), ("é", 1)]
)
def test_invalid_text_has_no_leaves(packed: str, width: int) -> None:
    assert unpack_leaves(packed, width) == []


def test_truncated_samples() -> None:
    assert unpack_samples(text(b"\x04abcd\x08ab")) == [b"abcd", b"ab"]
    assert unpack_samples("no base64 at all") == []

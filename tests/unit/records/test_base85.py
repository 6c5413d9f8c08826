"""Base 85 read in long integers says what the standard library says."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.records.sketch_codec import decode85


@given(st.binary(max_size=300))
def test_what_was_encoded_comes_back(data: bytes) -> None:
    assert decode85(base64.b85encode(data).decode()) == data


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_any_text_is_read_or_refused_as_the_standard_library_does(text: str) -> None:
    try:
        expected = base64.b85decode(text)
    except ValueError:
        with pytest.raises(ValueError, match="base85"):
            decode85(text)
    else:
        assert decode85(text) == expected


def test_letters_of_other_alphabets_are_refused() -> None:
    with pytest.raises(ValueError, match="ascii"):
        decode85("ü" * 5)

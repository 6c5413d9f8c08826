"""Packed sketches come back within their stated error, with norms rounded up, in little space."""

from __future__ import annotations

import base64
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.sketch_codec import _SCALES, decode85, pack, unpack

norms = st.floats(min_value=1e-140, max_value=1e140)


@given(norms, st.floats(min_value=-30, max_value=30))
def test_values_come_back_within_their_error(norm: float, ratio: float) -> None:
    (found,) = unpack(pack([Sketch(norm * ratio, norm, 0, 10)]))
    assert found.known
    assert abs(found.value - norm * ratio) <= found.error * (1 + 1e-12)
    assert found.norm_low < norm <= found.norm


@given(norms, norms)
def test_norms_keep_their_order(first: float, second: float) -> None:
    a, b = unpack(pack([Sketch(0.0, first, 0, 1), Sketch(0.0, second, 0, 1)]))
    assert (a.norm <= b.norm) if first <= second else (a.norm >= b.norm)


def test_norms_of_usual_gradients_are_good_to_half_an_octave() -> None:
    for exponent in range(-55, 28):
        (found,) = unpack(pack([Sketch(0.0, 1.1 * 2.0**exponent, 0, 1)]))
        assert found.norm / (1.1 * 2.0**exponent) < 1.415
        assert found.error < found.norm * 2**-26


def test_there_is_a_code_for_everything() -> None:
    assert len(_SCALES) <= 255
    assert list(_SCALES) == sorted(set(_SCALES))
    zero, nan, overflow, tiny, saturated, off = unpack(
        pack(
            [
                Sketch(0.0, 0.0, 0, 5),
                Sketch(math.nan, math.nan, 3, 5),
                Sketch(1.0, math.inf, 0, 5),
                Sketch(5e-324, 0.0, 0, 5),
                Sketch(math.inf, math.inf, 2**40, 2**41),
                Sketch(1000.0, 1.0, 0, 5),
            ]
        )
    )
    assert (zero.value, zero.norm, zero.error, zero.known) == (0, 0, 0, True)
    assert (nan.nonfinite, nan.known) == (3, False)
    assert (overflow.nonfinite, overflow.known) == (0, False)
    assert tiny.norm > 0
    assert saturated.nonfinite == 2**32 - 1
    assert not off.known


def test_two_hundred_parameters_fit() -> None:
    draw = random.Random(0)
    text = pack([Sketch(draw.gauss(0, 1), draw.random() + 1, 0, 9) for _ in range(200)])
    assert len(text) <= 1260
    assert json.dumps(text) == f'"{text}"'
    assert len(unpack(text)) == 200
    assert unpack(pack([])) == []


def test_other_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="sketch"):
        unpack("00000")
    with pytest.raises(ValueError, match="base85"):
        unpack('"' * 25)


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

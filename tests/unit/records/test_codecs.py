"""Codecs of digests and sketches."""

from __future__ import annotations

import base64
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import (
    SCALES,
    decode85,
    distribute,
    pack,
    share_of,
    shares,
    unpack,
    unpack_leaves,
    unpack_samples,
)
from ddpcheck.records.kinds.modules import ModuleRecord


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


norms = st.floats(min_value=1e-140, max_value=1e140)


@given(norms, st.floats(min_value=-30, max_value=30))
def test_values_are_unpacked_within_their_error(norm: float, ratio: float) -> None:
    (unpacked,) = unpack(pack([Sketch(norm * ratio, norm, 0, 10)]))
    assert unpacked.known
    assert abs(unpacked.value - norm * ratio) <= unpacked.error * (1 + 1e-12)
    assert unpacked.norm_low < norm <= unpacked.norm


@given(norms, norms)
def test_norms_keep_their_order(first: float, second: float) -> None:
    a, b = unpack(pack([Sketch(0.0, first, 0, 1), Sketch(0.0, second, 0, 1)]))
    assert (a.norm <= b.norm) if first <= second else (a.norm >= b.norm)


def test_norms_of_usual_gradients_are_accurate_to_half_an_octave() -> None:
    for exponent in range(-55, 28):
        (unpacked,) = unpack(pack([Sketch(0.0, 1.1 * 2.0**exponent, 0, 1)]))
        assert unpacked.norm / (1.1 * 2.0**exponent) < 1.415
        assert unpacked.error < unpacked.norm * 2**-26


def test_special_values() -> None:
    assert len(SCALES) <= 255
    assert list(SCALES) == sorted(set(SCALES))
    zero, nan, overflow, tiny, saturated, too_large = unpack(
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
    assert not too_large.known


def test_packed_size_of_200_parameters() -> None:
    draw = random.Random(0)
    text = pack([Sketch(draw.gauss(0, 1), draw.random() + 1, 0, 9) for _ in range(200)])
    assert len(text) <= 1260
    assert json.dumps(text) == f'"{text}"'
    assert len(unpack(text)) == 200
    assert unpack(pack([])) == []


def test_invalid_text_is_rejected() -> None:
    with pytest.raises(ValueError, match="sketch"):
        unpack("00000")
    with pytest.raises(ValueError, match="base85"):
        unpack('"' * 25)


@given(st.binary(max_size=300))
def test_decode85_inverts_b85encode(data: bytes) -> None:
    assert decode85(base64.b85encode(data).decode()) == data


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_decode85_agrees_with_the_standard_library(text: str) -> None:
    try:
        expected = base64.b85decode(text)
    except ValueError:
        with pytest.raises(ValueError, match="base85"):
            decode85(text)
    else:
        assert decode85(text) == expected


def test_non_ascii_text_is_rejected() -> None:
    with pytest.raises(ValueError, match="ascii"):
        decode85("ü" * 5)


LAYERS = (1 << 20, 1 << 10) * 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_every_gradient_has_one_rank(ranks: int) -> None:
    sizes = tuple(random.Random(ranks).choices(range(1000), k=33))
    distributed = distribute(sizes, ranks)
    assert len(distributed) == ranks
    assert sorted(index for share in distributed for index in share) == list(range(33))
    assert all(list(share) == sorted(share) for share in distributed)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_alternating_weights_and_biases_are_distributed_evenly(ranks: int) -> None:
    work = [sum(LAYERS[index] for index in share) for share in distribute(LAYERS, ranks)]
    assert max(work) == min(work)


def test_direction_alternates_between_rounds() -> None:
    assert distribute((8, 7, 6, 5, 4, 3), 2) == ((0, 3, 4), (1, 2, 5))
    assert distribute((3, 4, 5, 6, 7, 8), 2) == ((1, 2, 5), (0, 3, 4))
    assert share_of([8, 7, 6, 5, 4, 3], 1, 2) == (1, 2, 5)


def test_shares_of_a_module_record() -> None:
    rows = [["a", "float32", [2, 4], 1], ["b", "float32", [7], 1], ["c", "float32", [], 1]]
    assert shares(ModuleRecord(0, "Net", [3, 5], 0, rows, [])) == {3: (0,), 5: (1, 2)}

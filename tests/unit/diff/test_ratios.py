"""One factor for all gradients, and what it is called."""

from __future__ import annotations

import pytest

from ddpcheck.diff.approximate import common_ratio, named, ratio_of
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.sketch_codec import Packed, pack, unpack
from tests.helpers.run_builder import sketch_of

SLACK = 1e-4


def packed(*values: float) -> list[Packed]:
    return unpack(pack(map(sketch_of, values)))


def test_a_factor_of_all() -> None:
    pairs = list(zip(packed(1.0, -2.0, 0.3), packed(3.0, -6.0, 0.9), strict=True))
    assert common_ratio(pairs, SLACK) == pytest.approx(3.0, rel=1e-6)


def test_no_factor_of_all() -> None:
    assert common_ratio(list(zip(packed(1.0, -2.0), packed(3.0, -6.1), strict=True)), SLACK) is None
    assert common_ratio(list(zip(packed(0.0), packed(1.0), strict=True)), SLACK) is None
    assert common_ratio(list(zip(packed(1.0), packed(float("nan")), strict=True)), SLACK) is None


def test_values_that_fit_by_chance_and_norms_that_do_not() -> None:
    [a], [b] = unpack(pack([Sketch(1.0, 1.0, 0, 4)])), unpack(pack([Sketch(2.0, 1.0, 0, 4)]))
    assert common_ratio([(a, b)], SLACK) is None


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (4.00001, "4.0 (= world size)"),
        (0.25, "0.25 (= 1 / world size)"),
        (-4.0, "-4.0 (= world size)"),
        (7.0001, "7.0"),
        (1 / 3, "0.333333"),
        (1.2345, "1.2345"),
    ],
)
def test_names(ratio: float, text: str) -> None:
    assert str(named(ratio, {"nothing": 1.0, "world size": 4.0}, SLACK)) == text


def test_ratios_of_settings() -> None:
    assert ratio_of(0.1, 0.4) == pytest.approx(4.0)
    for a, b in ((0, 1), (1, 0), (True, 2), ("a", "b"), (None, 1), (1.0, float("inf"))):
        assert ratio_of(a, b) is None

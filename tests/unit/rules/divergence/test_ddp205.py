"""DDP205: how gradients were changed, from a few of their values."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.rules.divergence.ddp205 import describe_change

THEIRS = [0.5, -0.25, 2.0, -0.125, 1.5]


def elements(ours: list[Any], theirs: list[Any] = THEIRS) -> dict[str, Any]:
    pairs = zip(ours, theirs, strict=True)
    return {"values": [{"index": [n], "by_rank": {"1": a, "0": b}} for n, (a, b) in enumerate(pairs)]}


def test_scaled() -> None:
    change = describe_change(elements([0.1 * x for x in THEIRS]), outlier=1, reference=0)
    assert change == "scaled by different factors: rank 1's values are 0.1 times those of rank 0"


def test_scaled_in_half_precision() -> None:
    """bfloat16 keeps eight bits."""
    rounded = [0.1 * x * (1 + 0.003 * (-1) ** n) for n, x in enumerate(THEIRS)]
    assert "rank 1's values are 0.1 times" in describe_change(elements(rounded), outlier=1, reference=0)


def test_clamped() -> None:
    ours, theirs = [0.1, -0.1, 0.1, -0.1], [0.5, -0.25, 2.0, -0.125]
    assert describe_change(elements(ours, theirs), outlier=1, reference=0) == "clamped at 0.1 on rank 1"


def test_set_to_zero() -> None:
    assert describe_change(elements([0.0] * 5), outlier=1, reference=0) == "set to zero on rank 1"


@pytest.mark.parametrize(
    "ours",
    [
        [1.0, -0.5, 2.5, 0.0, 1.0],
        [x + 0.01 for x in THEIRS],
        [-0.1 * x if n else x for n, x in enumerate(THEIRS)],
        [float("nan")] * 5,
        ["0x3f80"] * 5,
    ],
)
def test_an_insignificant_latency_is_zero(ours: list[Any]) -> None:
    assert describe_change(elements(ours), outlier=1, reference=0) == ""


def test_two_values_are_too_few() -> None:
    assert describe_change(elements([0.25, -0.125], THEIRS[:2]), outlier=1, reference=0) == ""
    assert describe_change({}, outlier=1, reference=0) == ""


def test_a_rank_whose_values_were_not_kept() -> None:
    assert describe_change(elements([0.1 * x for x in THEIRS]), outlier=2, reference=0) == ""

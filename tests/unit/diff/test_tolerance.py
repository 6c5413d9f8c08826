"""How much difference is allowed: by dtype, by step, and as asked for."""

from __future__ import annotations

import pytest

from ddpcheck.diff.approximate import LARGEST, Tolerance


@pytest.mark.parametrize(
    ("dtypes", "half", "first"),
    [
        (["float32"], False, 2.0**-8),
        (["float32", "float64"], False, 2.0**-8),
        # The records' own resolution.
        (["float64"], False, 2.0**-20),
        # A GradScaler tells that fp32 parameters are trained in fp16.
        (["float32"], True, LARGEST),
        (["float32", "bfloat16"], False, LARGEST),
        (["something new"], False, LARGEST),
    ],
)
def test_the_coarsest_dtype_decides(dtypes: list[str], half: bool, first: float) -> None:
    assert Tolerance(None, dtypes, half).at(0) == first


def test_it_grows_with_the_steps_up_to_a_limit() -> None:
    tolerance = Tolerance(None, ["float32"], False)
    assert tolerance.at(9) == pytest.approx(10 * tolerance.at(0))
    assert tolerance.at(100_000) == LARGEST


def test_what_was_asked_for_holds_at_every_step() -> None:
    tolerance = Tolerance(0.5, ["float32"], False)
    assert (tolerance.at(0), tolerance.at(1000)) == (0.5, 0.5)

"""Steps as people write them."""

from __future__ import annotations

import pytest

from ddpcheck.step_ranges import parse_steps


def test_single_steps_and_ranges() -> None:
    steps = parse_steps("3, 10:13")
    assert [step for step in range(20) if step in steps] == [3, 10, 11, 12]


def test_open_ranges() -> None:
    steps = parse_steps(":2,50:")
    assert [step for step in (0, 1, 2, 49, 50, 10**9) if step in steps] == [0, 1, 50, 10**9]


def test_nothing_is_no_step() -> None:
    assert not parse_steps("")


@pytest.mark.parametrize("text", ["x", "3:x", "5:5", "7:3", "-2"])
def test_what_is_no_step(text: str) -> None:
    with pytest.raises(ValueError, match="step"):
        parse_steps(text)

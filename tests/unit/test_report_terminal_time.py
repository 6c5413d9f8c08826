"""What is said below the table of time where page faults take a good part of the step."""

from __future__ import annotations

from typing import Any

import pytest
from sample_measurements import measurements

from ddpcheck.reports.terminal_time import memory_taken_again
from ddpcheck.reports.time_json import time_table


def said(faults: int | None, kernel_us: int | None, clock: str = "host") -> str:
    """Of a step of 12 ms, on rank 1 of two."""
    raw: dict[str, Any] = {**measurements(ranks=2, late=1)["time"][0], "clock": clock}
    raw["ranks"][1] |= {"faults": faults, "kernel_us": kernel_us}
    return memory_taken_again(time_table(raw))


def test_much_of_the_step() -> None:
    assert said(2_500, 6_000).startswith("up to 2,500 page faults a step, 50 % of the time in the kernel")


@pytest.mark.parametrize(
    ("faults", "kernel_us", "clock"),
    [(2_500, 1_000, "host"), (100, 6_000, "host"), (2_500, 6_000, "device"), (None, None, "host")],
    ids=["little", "something else", "on a device", "not known"],
)
def test_nothing_worth_a_line(faults: int | None, kernel_us: int | None, clock: str) -> None:
    assert said(faults, kernel_us, clock) == ""

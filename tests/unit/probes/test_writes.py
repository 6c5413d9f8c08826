"""When in a step parameters are written by something else than the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.records.kinds.digests import Stage
from tests.helpers.fake_context import FakeContext, Job


def hows(write: Callable[[str, nn.Module], None], forwards: int = 1) -> list[str]:
    """Three steps of a job in which `write` is called at each of their parts."""
    torch.manual_seed(0)
    module, context = nn.Linear(3, 2), FakeContext()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job = Job(module, context).wrapped()
    for _ in range(3):
        write("before", module)
        for _ in range(forwards):
            output = job.forward(torch.ones(1, 3))
            write("forward", module)
            output.sum().backward()
            write("after", module)
        job.step(optimizer)
    return [record.how for record in context.digests(Stage.REWRITTEN) if record.optimizer is not None]


@pytest.mark.parametrize(
    ("part", "how"),
    [
        ("before", "before the forward"),
        ("forward", "inside the forward"),
        ("after", "between backward and step"),
    ],
)
def test_the_second_write_tells_when(part: str, how: str) -> None:
    def write(now: str, module: Any) -> None:
        if now == part:
            module.weight.data += 1

    assert hows(write) == ["", how, how]


def test_among_several_forwards_it_is_not_told() -> None:
    def write(now: str, module: Any) -> None:
        if now == "forward":
            module.weight.data += 1

    assert hows(write, forwards=2) == ["", "", ""]


def test_nobody_writes() -> None:
    assert hows(lambda now, module: None) == []

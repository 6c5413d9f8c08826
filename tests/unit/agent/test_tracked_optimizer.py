"""Optimizers under watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.agent.tracked_optimizer import groups_of, inside_another_step, signature, steps_inside_backward
from ddpcheck.records.kinds.digests import Stage
from tests.helpers.fake_context import FakeContext, Job, watch


def test_groups_are_places_in_the_modules_list() -> None:
    module, stranger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    tracked = watch(module)
    optimizer = torch.optim.SGD(
        [{"params": [module[1].bias, module[0].weight]}, {"params": [stranger.weight, module[1].weight]}],
        lr=0.1,
    )
    assert groups_of(optimizer, tracked) == [[3, 0], [-1, 2]]


def test_the_signature_changes_with_groups_and_with_the_module() -> None:
    module = nn.Linear(2, 2)
    tracked = watch(module)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    first = signature(optimizer, [tracked])
    assert signature(optimizer, [tracked]) == first
    optimizer.add_param_group({"params": [module.bias]})
    second = signature(optimizer, [tracked])
    assert second != first
    module.late = nn.Parameter(torch.zeros(1))
    tracked.changes()
    assert signature(optimizer, [tracked]) != second


class Outer(torch.optim.Optimizer):
    """Hands its step on to another optimizer, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.fixture
def seen() -> Iterator[list[tuple[str, str, bool]]]:
    seen: list[tuple[str, str, bool]] = []
    handles = [
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: seen.append(("before", type(optimizer).__name__, inside_another_step()))
        ),
        register_optimizer_step_post_hook(
            lambda optimizer, *_: seen.append(("after", type(optimizer).__name__, inside_another_step()))
        ),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_only_the_outermost_step_counts(seen: list[tuple[str, str, bool]]) -> None:
    Outer([nn.Parameter(torch.zeros(1))]).step()
    assert seen == [
        ("before", "Outer", False),
        ("before", "SGD", True),
        ("after", "SGD", True),
        ("after", "Outer", False),
    ]


def test_a_plain_step_is_inside_no_other(seen: list[tuple[str, str, bool]]) -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()
    assert seen == [("before", "AdamW", False), ("after", "AdamW", False)]


def test_after_a_step_that_raised_the_next_one_counts(seen: list[tuple[str, str, bool]]) -> None:
    outer = Outer([nn.Parameter(torch.zeros(1))])
    inner = outer.inner
    outer.inner = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        outer.step()
    seen.clear()
    inner.step()
    assert seen == [("before", "SGD", False), ("after", "SGD", False)]


def test_a_closure_that_steps_another_optimizer_is_inside(seen: list[tuple[str, str, bool]]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def closure() -> float:
        other.step()
        return 0.0

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step(closure)
    assert ("before", "SGD", True) in seen


# This torch's own import of the package warns.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_that_step_inside_the_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    (inside,) = module.weight._in_backward_optimizers  # type: ignore[attr-defined]
    assert steps_inside_backward(inside)
    assert not steps_inside_backward(torch.optim.SGD(module.parameters(), lr=0.1))
    assert not steps_inside_backward(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def numbers(module: nn.Module, *optimizers: torch.optim.Optimizer) -> list[tuple[int | None, int]]:
    """Optimizer and step of every look after a step, for these optimizers stepping in turn."""
    context = FakeContext()
    job = Job(module, context).wrapped()
    for optimizer in optimizers:
        job.train(optimizer)
    return [(record.optimizer, record.step) for record in context.digests(Stage.PARAMS)]


def test_an_optimizer_made_anew_goes_on_counting() -> None:
    module = nn.Linear(2, 2)
    old, new = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    assert numbers(module, old, old, new, new) == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_optimizers_side_by_side_take_the_same_step() -> None:
    module = nn.Linear(2, 2)
    first, second = torch.optim.SGD([module.weight], lr=0.1), torch.optim.SGD([module.bias], lr=0.1)
    assert numbers(module, first, second, first, second) == [(0, 0), (1, 0), (0, 1), (1, 1)]

"""Tracked optimizers: parameter groups, nested steps and step counts."""

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


def test_groups_contain_parameter_indices() -> None:
    module, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    tracked = watch(module)
    optimizer = torch.optim.SGD(
        [{"params": [module[1].bias, module[0].weight]}, {"params": [other.weight, module[1].weight]}],
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
    """Calls the step of another optimizer, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.fixture
def calls() -> Iterator[list[tuple[str, str, bool]]]:
    calls: list[tuple[str, str, bool]] = []
    handles = [
        register_optimizer_step_pre_hook(
            lambda optimizer, *_: calls.append(("before", type(optimizer).__name__, inside_another_step()))
        ),
        register_optimizer_step_post_hook(
            lambda optimizer, *_: calls.append(("after", type(optimizer).__name__, inside_another_step()))
        ),
    ]
    yield calls
    for handle in handles:
        handle.remove()


def test_only_the_outermost_step_counts(calls: list[tuple[str, str, bool]]) -> None:
    Outer([nn.Parameter(torch.zeros(1))]).step()
    assert calls == [
        ("before", "Outer", False),
        ("before", "SGD", True),
        ("after", "SGD", True),
        ("after", "Outer", False),
    ]


def test_plain_step_is_not_nested(calls: list[tuple[str, str, bool]]) -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()
    assert calls == [("before", "AdamW", False), ("after", "AdamW", False)]


def test_step_after_one_that_raised(calls: list[tuple[str, str, bool]]) -> None:
    outer = Outer([nn.Parameter(torch.zeros(1))])
    inner = outer.inner
    outer.inner = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        outer.step()
    calls.clear()
    inner.step()
    assert calls == [("before", "SGD", False), ("after", "SGD", False)]


def test_step_inside_a_closure_is_nested(calls: list[tuple[str, str, bool]]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def closure() -> float:
        other.step()
        return 0.0

    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step(closure)
    assert ("before", "SGD", True) in calls


# Some versions of torch warn when they import this package.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_that_step_inside_the_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    (inside,) = module.weight._in_backward_optimizers  # type: ignore[attr-defined]
    assert steps_inside_backward(inside)
    assert not steps_inside_backward(torch.optim.SGD(module.parameters(), lr=0.1))
    assert not steps_inside_backward(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def optimizers_and_steps(
    module: nn.Module, *optimizers: torch.optim.Optimizer
) -> list[tuple[int | None, int]]:
    """Optimizer and step of each digest after a step, for these optimizers stepping in turn."""
    context = FakeContext()
    job = Job(module, context).wrapped()
    for optimizer in optimizers:
        job.train(optimizer)
    return [(record.optimizer, record.step) for record in context.digests(Stage.PARAMS)]


def test_new_optimizer_continues_the_step_count() -> None:
    module = nn.Linear(2, 2)
    old, new = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    assert optimizers_and_steps(module, old, old, new, new) == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_optimizers_of_different_parameters_share_step_numbers() -> None:
    module = nn.Linear(2, 2)
    first, second = torch.optim.SGD([module.weight], lr=0.1), torch.optim.SGD([module.bias], lr=0.1)
    assert optimizers_and_steps(module, first, second, first, second) == [(0, 0), (1, 0), (0, 1), (1, 1)]

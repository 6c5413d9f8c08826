"""The gradient-start probe: does the first backward of a step start from cleared gradients?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddpcheck.probes import gradient_start
from ddpcheck.probes.gradient_start import GradientStartProbe
from ddpcheck.records.kinds.state import GradientStart, GradientStartRecord
from tests.helpers.fake_context import FakeContext, Job

Clear = Callable[[torch.optim.Optimizer], object]


class Training:
    def __init__(self, parts: int = 1) -> None:
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.context = FakeContext()
        self.job = Job(self.module, self.context, probes=[GradientStartProbe]).wrapped()
        groups = [self.module.parameters()] if parts == 1 else [part.parameters() for part in self.module]
        self.optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]

    def backward(self) -> None:
        loss = self.job.forward(torch.ones(2, 3)).sum()
        self.job.dispatcher.backward_called(loss)
        loss.backward()

    def steps(self, *clears: Clear) -> list[tuple[int, str]]:
        for clear in clears:
            self.backward()
            for optimizer in self.optimizers:
                self.job.step(optimizer)
            clear(self.optimizers[0])
        self.backward()
        return [(record.step, record.start) for record in self.context.of(GradientStartRecord)]


def none(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def in_place(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def through_data(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.zero_()


def nothing(optimizer: torch.optim.Optimizer) -> None:
    pass


@pytest.mark.parametrize("clear", [none, in_place, through_data])
def test_cleared_gradients_need_no_record(clear: Clear) -> None:
    assert Training().steps(*[clear] * 4) == []


def test_old_gradients_are_written_when_they_begin_and_end() -> None:
    found = Training().steps(none, none, nothing, nothing, nothing, none, none)
    assert found == [(3, GradientStart.OLD.value), (6, GradientStart.CLEARED.value)]


def test_only_one_of_two_optimizers_clears() -> None:
    assert Training(parts=2).steps(none, none) == [(1, GradientStart.PARTLY_OLD.value)]


def test_accumulation_within_a_step_is_no_start() -> None:
    training = Training()
    training.backward()
    training.backward()
    assert training.steps(none, none) == []


def test_another_backward_in_between_does_not_decide() -> None:
    training = Training()
    training.steps(none)
    training.job.step(training.optimizers[0])
    other = torch.ones(1, requires_grad=True).sum()
    training.job.dispatcher.backward_called(other)
    other.backward()
    none(training.optimizers[0])
    assert training.steps(none) == []


def test_the_gradients_of_parameters_that_no_optimizer_steps_do_not_count() -> None:
    training = Training(parts=2)
    training.optimizers = training.optimizers[:1]
    assert training.steps(none, none, none) == []


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_start, "MOST_RECORDS", 2)
    training = Training()
    assert len(training.steps(*[none, nothing] * 4)) == 2
    assert [record.last for record in training.context.of(GradientStartRecord)] == [False, True]

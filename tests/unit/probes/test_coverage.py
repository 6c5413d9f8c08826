"""The coverage probe: parameters that optimizers step, and which of them are compared."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from ddpcheck.agent.unwrapped_tracker import UnwrappedTracker
from ddpcheck.probes.coverage import CoverageProbe, parallelism
from ddpcheck.records.kinds.coverage import StepCoverageRecord, TrainingRecord
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


@pytest.fixture
def wrapped_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside of DDP is compared, as for parameters that cannot be matched across ranks."""
    monkeypatch.setattr(UnwrappedTracker, "of", lambda *args: None)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def latest(context: FakeContext) -> dict[int, StepCoverageRecord]:
    return {record.entry: record for record in context.of(StepCoverageRecord)}


def steps(job: Job, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        job.step(optimizer)


def test_parameters_of_a_module_are_compared(context: FakeContext) -> None:
    job = Job(model(), context).wrapped()
    steps(job, torch.optim.SGD(job.module.parameters(), 0.1), 5)
    job.context.emit(CoverageProbe.before_exit)
    [record] = latest(context).values()
    assert (record.name, record.steps, record.compared, record.not_compared) == ("SGD", 5, 4, {})
    # The call site is the innermost line outside of ddpcheck and libraries: here, that of the helper.
    assert "fake_context.py:" in record.where
    assert context.of(TrainingRecord)[-1].seen == []


def test_records_are_written_at_powers_of_two_and_at_the_end(context: FakeContext) -> None:
    job = Job(model(), context).wrapped()
    steps(job, torch.optim.SGD(job.module.parameters(), 0.1), 21)
    assert [record.steps for record in context.of(StepCoverageRecord)] == [1, 2, 4, 8, 16]
    job.context.emit(CoverageProbe.before_exit)
    assert [record.steps for record in context.of(StepCoverageRecord)][-1] == 21


@pytest.mark.usefixtures("wrapped_only")
def test_an_optimizer_of_another_model(context: FakeContext) -> None:
    job, other = Job(model(), context).wrapped(), model()
    both = torch.optim.Adam([*job.module.parameters(), *other.parameters()])
    own = torch.optim.SGD(other[0].parameters(), 0.1)
    steps(job, both, 1)
    steps(job, own, 2)
    first, second = latest(context).values()
    assert (first.name, first.compared, first.not_compared) == ("Adam", 4, {"no_module": 4})
    assert (second.name, second.compared, second.not_compared) == ("SGD", 0, {"no_module": 2})


def test_parameters_outside_of_ddp_are_compared(context: FakeContext) -> None:
    job, other = Job(model(), context).wrapped(), model()
    both = torch.optim.Adam([*job.module.parameters(), *other.parameters()])
    own = torch.optim.SGD(other[0].parameters(), 0.1)
    steps(job, both, 1)
    steps(job, own, 2)
    counts = [(record.name, record.compared, record.not_compared) for record in latest(context).values()]
    assert counts == [("Adam", 8, {}), ("SGD", 2, {})]
    # Also those whose wrapper is deleted.
    job.dispatcher._release(job.tracked)
    steps(job, both, 1)
    assert latest(context)[0].not_compared == {}


@pytest.mark.usefixtures("wrapped_only")
def test_frozen_parameters_are_not_trained_until_they_are_unfrozen(context: FakeContext) -> None:
    job, other = Job(model(), context).wrapped(), model().requires_grad_(False)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    steps(job, optimizer, 3)
    assert latest(context)[0].not_compared == {}
    other[0].requires_grad_(True)
    steps(job, optimizer, 1)
    assert latest(context)[0].not_compared == {"no_module": 2}


def test_parameters_that_ddp_ignores(context: FakeContext) -> None:
    job = Job(model(), context).wrapped()
    job.tracked.ignored = frozenset({"1.weight"})
    job.tracked.list_tensors()
    steps(job, torch.optim.SGD(job.module.parameters(), 0.1), 1)
    assert latest(context)[0].not_compared == {"ignored": 1}


@pytest.mark.usefixtures("wrapped_only")
def test_parameters_that_are_trained_first_and_wrapped_later(context: FakeContext) -> None:
    """The broadcast of DDP makes them equal, and they are compared after it."""
    job, other = Job(model(), context).wrapped(), model()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    steps(job, optimizer, 1)
    assert latest(context)[0].not_compared == {"no_module": 4}
    second = Job(other, context, index=1)
    second.dispatcher = job.dispatcher
    job.dispatcher._in_order.append(second.tracked)
    job.dispatcher._modules[id(other)] = second.tracked
    second.wrapped()
    steps(job, optimizer, 2)
    context.emit(CoverageProbe.before_exit)
    records = latest(context)
    assert [(record.compared, record.not_compared) for record in records.values()] == [(0, {}), (4, {})]


@pytest.mark.usefixtures("wrapped_only")
def test_a_temporary_model_that_is_gone_before_the_first_wrapping(context: FakeContext) -> None:
    """For example one that makes a checkpoint; its values reach a wrapped module at most through its broadcast."""
    job = Job(model(), context)
    job.dispatcher._in_order.clear()
    kept, temporary = model(), model()
    steps(job, torch.optim.SGD(temporary.parameters(), 0.1), 1)
    steps(job, torch.optim.Adam(kept[0].parameters()), 1)
    assert [record.not_compared for record in latest(context).values()] == [
        {"no_module": 4},
        {"no_module": 2},
    ]
    del temporary
    job.dispatcher._in_order.append(job.tracked)
    job.wrapped()
    context.emit(CoverageProbe.before_exit)
    assert [record.not_compared for record in latest(context).values()] == [{}, {"no_module": 2}]


@pytest.mark.usefixtures("wrapped_only")
def test_a_wrapper_that_is_deleted(context: FakeContext) -> None:
    job = Job(model(), context).wrapped()
    optimizer = torch.optim.SGD(job.module.parameters(), 0.1)
    steps(job, optimizer, 2)
    job.dispatcher._release(job.tracked)
    steps(job, optimizer, 3)
    context.emit(CoverageProbe.before_exit)
    records = latest(context)
    assert [(record.steps, record.compared, record.not_compared) for record in records.values()] == [
        (2, 4, {}),
        (3, 0, {"wrapper_deleted": 4}),
    ]


def test_optimizers_made_in_a_loop_share_an_entry(context: FakeContext) -> None:
    job = Job(model(), context).wrapped()
    for _ in range(20):
        steps(job, torch.optim.SGD(job.module.parameters(), 0.1), 1)
    context.emit(CoverageProbe.before_exit)
    [record] = latest(context).values()
    assert (record.compared, record.not_compared) == (4, {})


def test_the_parameters_are_not_read_at_every_step(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model(), context).wrapped()
    optimizer = torch.optim.SGD(job.module.parameters(), 0.1)
    counted: list[int] = []
    split = CoverageProbe._split
    monkeypatch.setattr(CoverageProbe, "_split", lambda *args: counted.append(1) or split(*args))
    steps(job, optimizer, 33)
    # When it is first seen, and at 2, 4, 8, 16 and 32 steps.
    assert len(counted) == 6


def test_backwards_before_wrapping(context: FakeContext) -> None:
    context.probes = [CoverageProbe(context)]
    context.emit(CoverageProbe.unwrapped_backward)
    context.emit(CoverageProbe.before_exit)
    assert context.of(TrainingRecord) == [TrainingRecord(1, [])]


def test_an_engine_is_recognised_by_the_class_of_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = ModuleType("deepspeed")
    engine = type("DeepSpeedEngine", (nn.Module,), {})
    deepspeed.DeepSpeedEngine = engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    gc.collect()
    assert "deepspeed" not in parallelism([])
    kept = type("MyEngine", (engine,), {})()
    assert "deepspeed" in parallelism([])
    del kept

"""The optimizer probe: hyperparameters, groups, skipped steps and state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.memory import MemoryPartsRecord
from ddpcheck.records.kinds.modules import (
    FIRST_UNWRAPPED,
    HyperRecord,
    ModuleRecord,
    OptimizerRecord,
    SkipRecord,
)
from ddpcheck.records.registry import to_line
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_hyperparameters_are_written_when_they_change(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    job.train(optimizer, steps=3)
    optimizer.param_groups[0]["lr"] = 0.05
    job.train(optimizer, steps=2)
    first, second = context.of(HyperRecord)
    assert (first.step, first.changed["0.lr"], first.changed["0.betas"]) == (0, 0.1, [0.9, 0.999])
    assert "0.params" not in first.changed
    assert (second.step, second.changed) == (3, {"0.lr": 0.05})
    short = [record.hyper for record in context.digests(Stage.PARAMS)]
    assert len(set(short[:3])) == 1
    assert len(set(short[3:])) == 1
    assert short[0] != short[3]


def test_going_back_gives_the_same_short_digest(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for lr in (0.1, 0.2, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        job.train(optimizer)
    one, two, three = (record.hyper for record in context.digests(Stage.PARAMS))
    assert one == three != two


def test_a_hyperparameter_that_turns_none_is_a_change(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job.train(optimizer)
    optimizer.param_groups[0]["maximize"] = None
    job.train(optimizer)
    assert context.of(HyperRecord)[-1].changed == {"0.maximize": None}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.ones(3), "tensor"),
        (float("nan"), "nan"),
        ((1, [2.0, None]), [1, [2.0, None]]),
        (list(range(100)), "list"),
        (object(), "object"),
        ({"password": "hunter2"}, "dict"),
    ],
)
def test_values_are_what_json_can_hold_and_ranks_can_compare(
    context: FakeContext, module: nn.Module, value: Any, written: Any
) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["extra"] = value
    job.train(optimizer, steps=3)
    (record,) = context.of(HyperRecord)
    assert record.changed["0.extra"] == written
    json.loads(to_line(record))


def test_groups_are_written_once_and_again_when_they_change(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    job.train(optimizer, steps=3)
    [record] = context.of(OptimizerRecord)
    assert (record.optimizer, record.name, record.module, record.groups) == (0, "SGD", 0, [[0]])
    assert "fake_context.py:" in record.where  # what called the step
    optimizer.add_param_group({"params": [module.bias]})
    job.train(optimizer, steps=2)
    [again] = context.of(OptimizerRecord)[1:]
    assert again.groups == [[0], [1]]


def test_an_optimizer_of_other_parameters_steps_beside_the_module(
    context: FakeContext, module: nn.Module
) -> None:
    job = Job(module, context).wrapped()
    head = nn.Linear(2, 2)
    other, own = torch.optim.SGD(head.parameters(), lr=0.1), torch.optim.SGD(module.parameters(), lr=0.1)
    for optimizer in (other, own, other):
        job.step(optimizer)
    described = context.of(ModuleRecord)[-1]
    assert (described.role, described.ordinal >= FIRST_UNWRAPPED) == ("stepped", True)
    assert [row[0] for row in described.parameters] == ["Linear.bias", "Linear.weight"]
    steps = [(digest.module, digest.optimizer, digest.step) for digest in context.digests(Stage.PARAMS)]
    # The number of the module's own optimizer does not depend on others.
    assert steps == [(1, described.ordinal, 0), (0, 0, 0), (1, described.ordinal, 1)]
    # Losses, times and memory are those of the steps of the DDP module.
    assert {record.optimizer for record in context.of(MemoryPartsRecord)} <= {0}


def test_an_optimizer_of_one_rank_is_passed_over(context: FakeContext, module: nn.Module) -> None:
    context.world_size = 1
    job = Job(module, context).wrapped()
    head = nn.Linear(2, 2)
    job.step(torch.optim.SGD(head.parameters(), lr=0.1))
    assert context.of(OptimizerRecord) == []
    assert context.digests(Stage.PARAMS) == []


def test_a_skipped_step_is_written_down_with_the_scale(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    job.train(optimizer)
    job.forward()
    job.dispatcher.scaler_before(scaler, optimizer)
    job.dispatcher.scaler_after(scaler, optimizer)
    assert context.of(SkipRecord) == [SkipRecord(0, 0, 1, 2, 1024.0)]


def test_the_scale_counts_as_a_hyperparameter(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    job.dispatcher.scaler_before(scaler, optimizer)
    job.train(optimizer)
    job.dispatcher.scaler_after(scaler, optimizer)
    assert context.of(SkipRecord) == []
    assert context.of(HyperRecord)[0].changed["GradScaler.scale"] == 1024.0


def test_fresh_optimizers_have_no_state_to_compare(context: FakeContext, module: nn.Module) -> None:
    Job(module, context).wrapped().train(torch.optim.AdamW(module.parameters()), steps=3)
    assert context.digests(Stage.STATE) == []


def loaded(module: nn.Module, exp_avg: float = 0.0) -> torch.optim.AdamW:
    """An optimizer loaded from a checkpoint."""
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[module.bias]["exp_avg"].add_(exp_avg)
    return optimizer


def test_a_loaded_state_is_digested_before_the_first_step(context: FakeContext, module: nn.Module) -> None:
    optimizer = loaded(module)
    Job(module, context).wrapped().train(optimizer, steps=3)
    (record,) = context.digests(Stage.STATE)
    assert (record.step, record.of, record.optimizer) == (0, "state", 0)


def test_on_request_at_every_step(module: nn.Module) -> None:
    context = FakeContext(optimizer_state=True)
    Job(module, context).wrapped().train(torch.optim.AdamW(module.parameters()), steps=3)
    assert [record.step for record in context.digests(Stage.STATE)] == [1, 2]


def test_a_state_that_differs_shows_at_its_parameter(module: nn.Module) -> None:
    other = nn.Linear(3, 2)
    other.load_state_dict(module.state_dict())
    records = []
    for each, change in ((module, 0.0), (other, 1.0)):
        context = FakeContext()
        Job(each, context).wrapped().train(loaded(each, change))
        records.append(context.digests(Stage.STATE)[0])
    assert records[0].root != records[1].root
    one, two = (unpack_leaves(record.leaves, record.width) for record in records)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False]
    assert records[0].hyper == records[1].hyper


def test_a_sharded_state_is_not_a_differing_state(module: nn.Module) -> None:
    """Under ZeRO every rank has the state of other parameters: it cannot be compared."""
    parts = []
    for kept in ("weight", "bias"):
        context = FakeContext()
        optimizer = loaded(module)
        dropped = module.bias if kept == "weight" else module.weight
        del optimizer.state[dropped]
        Job(module, context).wrapped().train(optimizer)
        parts.append(context.digests(Stage.STATE)[0].hyper)
    assert parts[0] != parts[1]


def test_a_state_that_is_loaded_later_is_digested_again(context: FakeContext, module: nn.Module) -> None:
    job = Job(module, context).wrapped()
    optimizer = torch.optim.AdamW(module.parameters())
    job.train(optimizer, steps=2)
    optimizer.load_state_dict(optimizer.state_dict())
    job.train(optimizer, steps=2)
    assert [record.step for record in context.digests(Stage.STATE)] == [2]

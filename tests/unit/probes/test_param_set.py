"""The parameter-set probe: parameters that DDP's reducer does not know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpcheck.probes import param_set
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import JoinRecord, ModuleRecord, StructureRecord
from tests.helpers.fake_context import FakeContext, Job


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


def test_an_added_parameter_is_written_down_once_with_the_new_list(context: FakeContext) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job.train(optimizer)
    module.late = nn.Parameter(torch.zeros(1))
    job.train(optimizer, steps=2)
    assert context.of(StructureRecord) == [StructureRecord(0, "added", "late", 1, 1)]
    before, after = context.of(ModuleRecord)
    assert [row[0] for row in before.parameters] == ["0.weight", "0.bias"]
    # A module's own parameters are listed before those of its children.
    assert [row[0] for row in after.parameters] == ["late", "0.weight", "0.bias"]
    listed = context.records.index(after)
    digest = next(r for r in context.records[listed:] if getattr(r, "stage", "") == Stage.PARAMS.value)
    assert len(unpack_leaves(digest.leaves, digest.width)) == 3


def test_unfrozen_after_wrapping(context: FakeContext) -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    job = Job(module, context).wrapped()
    module.bias.requires_grad_(True)
    job.train(torch.optim.SGD(module.parameters(), lr=0.1))
    assert [(r.change, r.parameter) for r in context.of(StructureRecord)] == [("unfrozen", "bias")]


def test_no_record_for_an_unchanged_module(context: FakeContext) -> None:
    module = nn.Linear(2, 2)
    Job(module, context).wrapped().train(torch.optim.SGD(module.parameters(), lr=0.1), steps=5)
    assert context.of(StructureRecord) == []
    assert len(context.of(ModuleRecord)) == 1


def test_a_job_that_swaps_parameters_at_every_step_does_not_fill_the_disk(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(param_set, "MAX_CHANGES", 10)
    module = nn.Linear(2, 2)
    job = Job(module, context, [param_set.ParamSetProbe]).wrapped()
    # All stay alive, as DDP's reducer keeps the first one: no address is reused.
    biases = [nn.Parameter(torch.zeros(2)) for _ in range(50)]
    for bias in biases:
        module.bias = bias
        job.forward()
    assert 5 <= len(context.of(StructureRecord)) <= 11


def test_training_inside_join_is_written_down_once(context: FakeContext) -> None:
    module = nn.Linear(2, 2)
    job = Job(module, context).wrapped()
    job.forward()
    assert context.of(JoinRecord) == []
    module._join_config = SimpleNamespace(enable=True)
    job.forward()
    job.forward()
    assert len(context.of(JoinRecord)) == 1

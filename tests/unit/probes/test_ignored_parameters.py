"""Parameters that DDP ignores."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
from ddpcheck.probes.param_set import IgnoredProbe
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from tests.helpers.fake_context import FakeContext, watch


def looks(gradients: list[float], ignored: tuple[str, ...] = ("1.weight", "gone")) -> list[DigestRecord]:
    """The records of a module with these gradients, one per step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch_optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    context = FakeContext()
    probe, tracked = IgnoredProbe(context), watch(module, ignored)
    probe.after_wrap(tracked)
    optimizer = TrackedOptimizer(0, "SGD", weakref.ref(torch_optimizer), (), modules=[tracked])
    for gradient in gradients:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        probe.before_step(optimizer)
        optimizer.steps += 1
    return context.of(DigestRecord)


def test_values_and_the_gradients_of_the_first_steps() -> None:
    records = looks([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [(record.stage, record.step) for record in records] == [
        (Stage.INIT_AFTER.value, -1),
        (Stage.APPLIED.value, 1),
        (Stage.APPLIED.value, 2),
        (Stage.APPLIED.value, 3),
    ]
    assert {record.of for record in records} == {"ignored"}
    # In the order of the names; a name that is not a parameter has no leaf.
    assert [leaf == bytes(8) for leaf in unpack_leaves(records[0].leaves, 8)] == [False, True]


def test_constant_gradients_are_no_evidence() -> None:
    assert [record.stage for record in looks([0.0] * 4)] == [Stage.INIT_AFTER.value]


def test_no_record_without_ignored_parameters() -> None:
    assert looks([1.0, 2.0, 3.0], ignored=()) == []

"""The dispatcher: calls of DDP's constructor that raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.agent import dispatcher as module_under_test
from ddpcheck.agent.dispatcher import Dispatcher
from ddpcheck.patches import constructing
from ddpcheck.probes.parameters import ParameterProbe
from ddpcheck.records.kinds.modules import ModuleRecord
from tests.helpers.fake_context import FakeContext


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    monkeypatch.setattr(module_under_test, "_group_ranks", lambda given: (0, 1))
    context = FakeContext()
    context.probes = [ParameterProbe(context)]
    return Dispatcher(context, DistributedDataParallel.__init__)  # type: ignore[arg-type]


def wrapper() -> nn.Module:
    """An instance whose constructor has not run."""
    return DistributedDataParallel.__new__(DistributedDataParallel)


def test_a_call_that_raises_is_forgotten(dispatcher: Dispatcher) -> None:
    network = nn.Linear(2, 1)
    first, second = wrapper(), wrapper()
    dispatcher.before_wrap(first, network, device_ids=[0])
    dispatcher.wrap_failed(first)
    assert dispatcher._in_order == []
    dispatcher.before_wrap(second, network)
    [tracked] = dispatcher._in_order
    # The same number in the group as on ranks where the first call succeeded.
    assert (tracked.index, tracked.ordinal) == (1, 0)
    assert [record.ordinal for record in dispatcher.context.of(ModuleRecord)] == [0, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("refused", [{"bucket_size": 25}, {"module": 3}])
def test_arguments_that_ddp_refuses(dispatcher: Dispatcher, refused: dict[str, Any]) -> None:
    ddp = wrapper()
    dispatcher.before_wrap(ddp, **{"module": torch.nn.Linear(2, 1), **refused})
    dispatcher.wrap_failed(ddp)
    assert dispatcher._in_order == []


def test_an_observed_constructor_passes_its_error_on() -> None:
    calls: list[str] = []

    def original(self: object, value: int) -> None:
        if value < 0:
            raise ValueError(value)

    observed = constructing(
        original,
        lambda self, value: calls.append("before"),
        lambda self, value: calls.append("after"),
        lambda self: calls.append("failed"),
    )
    observed(object(), 1)
    with pytest.raises(ValueError, match="-1"):
        observed(object(), -1)
    assert calls == ["before", "after", "before", "failed"]

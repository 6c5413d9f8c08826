"""The program-state probe: what is in effect at training forwards, written when it changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcheck.probes import program_state
from ddpcheck.probes.program_state import ProgramStateProbe
from ddpcheck.records.kinds.state import StateRecord
from tests.helpers.fake_context import FakeContext, Job


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


class Training:
    """Steps with real backwards; the probe sees what it sees in a rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.context = FakeContext()
        self.job = Job(module, self.context, probes=[ProgramStateProbe]).wrapped()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def forward(self) -> torch.Tensor:
        return self.job.forward(torch.ones(2, 3)).sum()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.forward().backward()
            self.job.step(self.optimizer)

    def end(self) -> list[StateRecord]:
        self.context.probes[0].before_exit()
        return self.context.of(StateRecord)


def test_one_record_for_a_state_that_stays() -> None:
    training = Training(network())
    training.step(70)
    (record,) = training.end()
    assert (record.module, record.step, record.last) == (0, 0, False)
    assert record.changed[":training"] is True
    assert (record.changed["2:p"], record.changed["1:eps"], record.changed["1:momentum"]) == (0.1, 1e-5, 0.1)
    assert record.changed["autocast"] is False
    # The wrapper of the tests calls the module.
    assert record.where.rpartition(":")[0].endswith("fake_context.py")


def test_modes_are_listed_where_they_differ_from_the_whole() -> None:
    training = Training(network())
    training.step()
    training.module[1].eval()
    training.step()
    training.module.eval()
    training.step()
    _, frozen, whole = training.end()
    assert (frozen.step, frozen.changed) == (1, {"1:training": False})
    assert (whole.step, whole.changed) == (2, {":training": False, "1:training": None})


def test_a_forward_without_backward_does_not_count() -> None:
    training = Training(network())
    training.step(2)
    training.module.eval()
    training.forward()
    training.module.train()
    training.step()
    assert len(training.end()) == 1


def test_autocast_and_frozen_parameters() -> None:
    training = Training(network())
    training.step()
    training.module[0].weight.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = training.forward()
    loss.backward()
    training.job.step(training.optimizer)
    training.step()
    _, mixed, plain = training.end()
    assert mixed.changed["0.weight:requires_grad"] is False
    assert (mixed.changed["autocast"], mixed.changed["autocast.dtype"]) == (True, "bfloat16")
    assert plain.changed == {"autocast": False, "autocast.dtype": None, "autocast.cache": None}


def test_a_step_with_two_modes_is_one_state() -> None:
    training = Training(network())
    for _ in range(10):
        training.forward().backward()
        training.module.eval()
        training.step()
        training.module.train()
    (record,) = training.end()
    assert record.changed[":training"] == [True, False]


def test_a_setting_that_is_set_directly_is_read_at_the_next_due_step() -> None:
    training = Training(network())
    training.step(17)
    training.module[2].p = 0.5
    training.step(20)
    first, changed = training.end()
    assert changed.changed == {"2:p": 0.5}
    assert 17 <= changed.step <= 17 + first.every
    assert changed.step % first.every == 0


def test_a_due_interval_grows_with_the_module() -> None:
    training = Training(nn.Sequential(nn.Linear(3, 1), *(nn.Dropout(0.0) for _ in range(600))))
    training.step()
    small = Training(network())
    small.step()
    assert training.end()[0].every > small.end()[0].every


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_state, "MOST_RECORDS", 3)
    training = Training(network())
    for step in range(8):
        training.module.train(step % 2 == 0)
        training.step()
    records = training.end()
    assert [record.last for record in records] == [False, False, True]


def test_without_gradients_every_training_forward_counts() -> None:
    context = FakeContext(gradients="off")
    module = network()
    job = Job(module, context, probes=[ProgramStateProbe]).wrapped()
    assert job.tracked.backward is None
    job.train(torch.optim.SGD(module.parameters(), lr=0.1), steps=2)
    assert len(context.of(StateRecord)) == 1


def test_precision_that_was_set_back_is_that_which_was_never_set() -> None:
    """On a device. Torch says "ieee" afterwards, and "none" before."""
    before = program_state.process_settings("cuda")
    try:
        torch.set_float32_matmul_precision("medium")
        assert program_state.process_settings("cuda") != before
        torch.set_float32_matmul_precision("highest")
        assert program_state.process_settings("cuda") == before
    finally:
        torch.set_float32_matmul_precision("highest")
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "none"

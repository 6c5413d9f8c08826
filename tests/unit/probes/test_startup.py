"""The start-up probe: the last stages, and the end of tracing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcheck.probes import startup
from ddpcheck.probes.process.startup_tracer import StartupTracer
from ddpcheck.probes.startup import StartupProbe
from ddpcheck.records.kinds.startup import StartupRecord
from tests.helpers.fake_context import FakeContext, Job


def test_from_wrapping_to_the_end_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartupTracer()
    monkeypatch.setattr(startup, "STARTUP", watch)
    context, module = FakeContext(), nn.Linear(8, 8)
    job = Job(module, context, [StartupProbe])
    job.wrapped()
    job.wrapped()
    assert context.of(StartupRecord) == []
    job.forward()
    assert watch.over
    job.train(torch.optim.SGD(module.parameters(), lr=0.1), 3)
    batch, step = context.of(StartupRecord)
    assert (batch.stage, step.stage) == ("batch", "step")
    assert batch.time + batch.seconds <= step.time + 0.001
    assert step.host > 1 << 20


def test_a_second_process_group_starts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartupTracer()
    watch.end()
    monkeypatch.setattr(startup, "STARTUP", watch)
    context, module = FakeContext(), nn.Linear(8, 8)
    Job(module, context, [StartupProbe]).wrapped().train(torch.optim.SGD(module.parameters(), lr=0.1), 2)
    assert context.of(StartupRecord) == []

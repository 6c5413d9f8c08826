"""The start-up probe: the last stretches, and the end of watching."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcheck.agent.startup_tracer import StartupTracer
from ddpcheck.probes import startup
from ddpcheck.probes.startup import StartupProbe
from ddpcheck.records.schema import StartupRecord
from tests.helpers.fake_scene import FakeScene, Job


def test_from_wrapping_to_the_end_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartupTracer()
    monkeypatch.setattr(startup, "STARTUP", watch)
    scene, module = FakeScene(), nn.Linear(8, 8)
    job = Job(module, scene, [StartupProbe])
    job.wrapped()
    job.wrapped()
    assert scene.of(StartupRecord) == []
    job.forward()
    assert watch.over
    job.train(torch.optim.SGD(module.parameters(), lr=0.1), 3)
    batch, step = scene.of(StartupRecord)
    assert (batch.stage, step.stage) == ("batch", "step")
    assert batch.time + batch.seconds <= step.time + 0.001
    assert step.host > 1 << 20


def test_a_second_process_group_starts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartupTracer()
    watch.end()
    monkeypatch.setattr(startup, "STARTUP", watch)
    scene, module = FakeScene(), nn.Linear(8, 8)
    Job(module, scene, [StartupProbe]).wrapped().train(torch.optim.SGD(module.parameters(), lr=0.1), 2)
    assert scene.of(StartupRecord) == []

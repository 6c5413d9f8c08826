"""Searches, evaluations and calls that wait, as one rank counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.probes import needless_syncs
from ddpcheck.probes.needless_syncs import FIRST_STEP, STEPS, NeedlessSyncsProbe
from ddpcheck.probes.process import host_waits
from ddpcheck.records.kinds.needless import HostWaitsRecord, ModuleSyncsRecord
from tests.helpers.fake_context import FakeContext, Job


def started() -> tuple[Job, torch.optim.Optimizer, FakeContext]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    context = FakeContext()
    job = Job(module, context, [NeedlessSyncsProbe]).wrapped()
    return job, torch.optim.SGD(module.parameters(), lr=0.1), context


def backward(job: Job) -> None:
    tracker = job.tracked.backward
    assert tracker is not None
    job.dispatcher.context.emit(NeedlessSyncsProbe.backward_begun, job.tracked)


def test_forwards_in_evaluation_mode_without_a_backward() -> None:
    job, optimizer, context = started()
    for step in range(4):
        job.forward()
        backward(job)
        job.step(optimizer)
        job.module.eval()
        for _ in range(step):
            job.forward()
        if step == 3:
            # Trained in evaluation mode: not an evaluation.
            job.forward()
            backward(job)
        with torch.no_grad():
            job.forward()
        job.module.train()
    context.emit(NeedlessSyncsProbe.before_exit)
    [record] = context.of(ModuleSyncsRecord)
    assert (record.evaluations, record.searches) == (6, 0)
    assert record.where


def test_calls_of_a_few_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def barrier() -> None:
        calls.append(1)

    monkeypatch.setattr(dist, "barrier", barrier)
    job, optimizer, context = started()
    for _ in range(FIRST_STEP + STEPS + 4):
        job.forward()
        job.step(optimizer)
        dist.barrier()
    assert dist.barrier is barrier
    assert torch.Tensor.item is torch._C.TensorBase.item
    context.emit(NeedlessSyncsProbe.before_exit)
    [record] = context.of(HostWaitsRecord)
    assert (record.step, record.steps) == (FIRST_STEP + 1, STEPS)
    [[kind, function, where, steps, count, _]] = record.sites
    assert (kind, function, steps, count) == ("barrier", "barrier", STEPS, STEPS)
    assert str(where).partition(":")[0] == __file__
    assert len(calls) == FIRST_STEP + STEPS + 4


def test_values_that_are_read_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needless_syncs, "devices_of", lambda tensors: [torch.device("cuda")])
    monkeypatch.setattr(host_waits, "on_device", lambda tensor: tensor.dtype is torch.float64)
    job, optimizer, context = started()
    for _ in range(FIRST_STEP + 12):
        job.forward()
        job.step(optimizer)
        assert float(torch.ones((), dtype=torch.float64)) == 1.0
        assert torch.ones(()).item() == 1
        if torch.ones((), dtype=torch.float64):
            torch.ones(2, dtype=torch.float64).tolist()
    assert torch.Tensor.item is not torch._C.TensorBase.item
    context.emit(NeedlessSyncsProbe.before_exit)
    assert torch.Tensor.item is torch._C.TensorBase.item
    [record] = context.of(HostWaitsRecord)
    assert sorted(str(site[1]) for site in record.sites) == ["__bool__", "__float__", "tolist"]
    assert {site[4] for site in record.sites} == {12}


def test_a_job_that_compiles_is_not_patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job, optimizer, context = started()
    before = dist.barrier
    monkeypatch.setattr(needless_syncs.torch_compat, "compiler_in_use", lambda: True)
    for _ in range(FIRST_STEP + 4):
        job.forward()
        job.step(optimizer)
        assert dist.barrier is before
    context.emit(NeedlessSyncsProbe.before_exit)
    assert context.of(HostWaitsRecord) == []

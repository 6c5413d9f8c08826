"""The memory probe: what it counts, and when it writes a record."""

from __future__ import annotations

import mmap
import warnings
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.analysis.memory.collector import RankMemory
from ddpcheck.probes import memory
from ddpcheck.probes.memory import AT_LEAST_EVERY, FIRST, STEPS_BETWEEN, MemoryProbe, memory_of
from ddpcheck.probes.process.os_counters import Resident, peak_resident, reads, resident
from ddpcheck.records.kinds.memory import MemoryPartsRecord, MemoryRecord
from tests.helpers.fake_context import FakeContext, Job
from tests.helpers.fake_device import FakeDevice
from tests.helpers.unreadable_tensors import fake, wrapper


def job(module: nn.Module, **options: Any) -> tuple[Job, FakeContext]:
    context = FakeContext(**options)
    return Job(module, context, [MemoryProbe]).wrapped(), context


def train(job: Job, optimizer: torch.optim.Optimizer, steps: int, set_to_none: bool = True) -> None:
    """With real backwards, since their first gradient is an event."""
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        job.forward(torch.randn(2, 8)).sum().backward()
        job.step(optimizer)


def test_parts_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    running, context = job(module)
    train(running, torch.optim.Adam(module.parameters()), 4)
    # Nothing has changed after the second step.
    (parts,) = context.of(MemoryPartsRecord)
    weights = (72 + 16) * 4
    assert (parts.step, parts.device) == (1, "cpu")
    assert (parts.parameters, parts.gradients, parts.buckets) == (weights, weights, weights)
    assert parts.buffers == 16 * 4 + 8
    # Two moments for each value, and a count for each tensor.
    assert parts.state == 2 * weights + 4 * 4
    assert parts.base > 1 << 20
    assert parts.kept < weights / 2


def test_gradients_from_before_the_backward_are_counted() -> None:
    module = nn.Linear(8, 8)
    running, context = job(module)
    train(running, torch.optim.SGD(module.parameters(), lr=0.1), 3, set_to_none=False)
    assert context.of(MemoryPartsRecord)[-1].kept == 72 * 4


def test_views_of_buckets_take_no_memory() -> None:
    module = nn.Linear(8, 8)
    running, context = job(module)
    running.tracked.options["gradient_as_bucket_view"] = True
    train(running, torch.optim.SGD(module.parameters(), lr=0.1), 3)
    parts = context.of(MemoryPartsRecord)[-1]
    assert (parts.views, parts.gradients, parts.buckets) == (True, 0, 72 * 4)


def test_shared_memory_counts_once() -> None:
    tensor = torch.zeros(100)
    assert memory_of([tensor, tensor[:10], tensor.view(10, 10)]) == 400
    assert memory_of([torch.empty(0), torch.empty(0)]) == 0
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,), check_invariants=True)
    assert memory_of([sparse.coalesce()]) == 2 * 8 + 2 * 4


def test_wrappers_count_with_their_reported_size() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory_of([wrapper(), fake(), torch.ones(3)]) == 3 * 12


def test_steps_are_written_when_memory_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100 << 20]
    monkeypatch.setattr(memory, "resident", lambda: Resident(now[0], now[0]))
    clock = count(0.0, memory.SECONDS_BETWEEN + 0.01)
    monkeypatch.setattr(memory, "monotonic", lambda: next(clock))
    module = nn.Linear(8, 8)
    running, context = job(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    running.train(optimizer, 100)
    now[0] += 3 << 20
    running.train(optimizer, 1)
    steps = [record.step for record in context.of(MemoryRecord)]
    last = FIRST - 1
    quiet = [last + AT_LEAST_EVERY, last + 2 * AT_LEAST_EVERY]
    assert steps == [*range(FIRST), *quiet, 100]
    assert context.of(MemoryRecord)[-1].host == 103 << 20


def test_fast_steps_are_not_all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr(memory, "resident", lambda: (reads.append(1), Resident(0, 0))[1])
    monkeypatch.setattr(memory, "monotonic", lambda: 0.0)
    module = nn.Linear(8, 8)
    running, _ = job(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    running.train(optimizer, FIRST)
    first_reads = len(reads)
    running.train(optimizer, 5 * STEPS_BETWEEN)
    assert first_reads >= FIRST
    assert len(reads) == first_reads + 5


def test_growth_is_recognised_in_a_short_job_of_fast_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [100 << 20]
    monkeypatch.setattr(memory, "resident", lambda: Resident(held[0], held[0]))
    monkeypatch.setattr(memory, "monotonic", lambda: 0.0)
    module = nn.Linear(8, 8)
    running, context = job(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(80):
        running.train(optimizer, 1)
        held[0] += 2 << 20
    rank = RankMemory()
    for record in context.of(MemoryRecord):
        rank.add(record)
    growth = rank.growth()
    assert growth is not None
    assert growth.per_step == pytest.approx(2 << 20, rel=0.1)


def test_only_the_first_optimizer_counts_steps_and_every_applies() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    running, context = job(module, every=2)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in module)
    for _ in range(4):
        running.forward(torch.randn(2, 8)).sum().backward()
        running.step(first)
        running.step(second)
    assert [record.step for record in context.of(MemoryRecord)] == [0, 2]


def test_memory_is_that_of_the_module_s_device(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device is another one: a job without `set_device`."""
    module = nn.Linear(8, 8)
    monkeypatch.setattr(memory, "devices_of", lambda tensors: [torch.device("cuda:1")])
    running, context = job(module)
    running.train(torch.optim.SGD(module.parameters(), lr=0.1), 1)
    (record,) = context.of(MemoryRecord)
    assert (record.allocated, record.reserved, record.peak) == (20, 80, 60)
    assert set(fake_device.read) == {"cuda:1"}


def test_a_module_on_the_host_reads_no_device(fake_device: FakeDevice) -> None:
    module = nn.Linear(8, 8)
    running, context = job(module)
    running.train(torch.optim.SGD(module.parameters(), lr=0.1), 1)
    assert context.of(MemoryRecord)[0].allocated == 0
    assert (fake_device.read, fake_device.captures_asked) == ([], 0)


def test_the_system_s_counters() -> None:
    before = resident()
    # Separate pages: a tensor might reuse memory that earlier tests have freed.
    kept = mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept[:: mmap.PAGESIZE] = b"1" * (len(kept) // mmap.PAGESIZE)
    after = resident()
    assert after.own - before.own == pytest.approx(50 << 20, rel=0.1)
    assert peak_resident() >= after.whole > after.own
    asked = reads().asked
    with open(torch.__file__, "rb") as file:
        size = len(file.read())
    assert size <= reads().asked - asked <= size + 20_000
    kept.close()

"""Probes are found by themselves, and the order in which they are registered has no meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpcheck.probes.probe import EVENTS, Phase, Probe
from ddpcheck.probes.registry import PROBES
from ddpcheck.records.kinds.modules import LossRecord
from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.records.registry import Record
from tests.helpers.fake_context import FakeContext, Job

# Measured values: they differ from run to run, whatever the order.
MEASURED = {"memory": {"step"}, "memory_parts": {"step", "module"}}


def test_every_module_with_a_probe_is_found() -> None:
    names = [probe.name for probe in PROBES]
    assert len(names) == len(set(names))
    assert {"clocks", "profile", "structure", "optimizers", "parameters", "gradients", "data"} <= set(names)
    assert [probe.name for probe in PROBES if probe.phase is Phase.CLOCK] == ["clocks"]
    assert [probe.name for probe in PROBES if probe.phase is Phase.PROFILER] == ["profile"]


def test_probes_handle_declared_events_only() -> None:
    """A public method that is no event would never be called."""
    events = {event.__name__ for event in EVENTS} | {"wanted"}
    for probe in PROBES:
        methods = {name for name, value in vars(probe).items() if callable(value) and name[0] != "_"}
        assert methods <= events | set(vars(Probe)) | set(probe.after_others.values()), probe


def test_records_do_not_depend_on_the_order_of_registration(tmp_path: Path) -> None:
    forwards = records(tmp_path / "forwards", PROBES)
    backwards = records(tmp_path / "backwards", PROBES[::-1])
    assert forwards == backwards
    kinds = {kind for kind, _ in forwards}
    assert {"module", "structure", "hyper", "digest", "backward", "applied", "comm_hook", "loss"} <= kinds


def records(folder: Path, probes: Sequence[type[Probe]]) -> Counter[tuple[str, str]]:
    """What a small job writes: a changed learning rate, a replaced parameter, a hook, then updates by hand."""
    folder.mkdir()
    context = FakeContext(folder, every=1)
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    batch = torch.ones(5, 4)
    # The profiler needs a whole process, and start-up is traced once a process.
    chosen = [probe for probe in probes if probe.name not in ("profile", "startup")]
    job = Job(module, context, chosen).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        backward(job, batch)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        job.step(optimizer)
        optimizer.zero_grad()
        if step == 1:
            module[0].weight = nn.Parameter(module[0].weight.detach().clone())
        if step == 2:
            module._comm_hooks = [(hook, None)]
    by_hand = nn.Linear(4, 2)
    second = Job(by_hand, context, index=1).wrapped()
    for _ in range(4):
        backward(second, batch)
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad = None
    context.emit(Probe.before_exit)
    return Counter(row for record in context.records for row in rows(record))


def backward(job: Job, batch: torch.Tensor) -> None:
    loss: torch.Tensor = job.forward(batch).square().mean()
    job.dispatcher.backward_called(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    job.dispatcher.backward_returned()


def hook(state: Any, bucket: Any) -> None:
    """Stands in for a communication hook; nothing calls it."""


def rows(record: Record) -> list[tuple[str, str]]:
    """Without what is measured. How many steps share a record depends on the time that they took."""
    if isinstance(record, ClockRecord):
        return [(record.kind, str(record.step + index)) for index in range(len(record.total))]
    if isinstance(record, LossRecord):
        first, of = record.step, record.optimizer
        return [(record.kind, f"{of} {first + index} {value}") for index, value in enumerate(record.values)]
    fields = asdict(record)
    kept = MEASURED.get(record.kind, fields.keys() - {"time"})
    return [(record.kind, repr({name: fields[name] for name in sorted(kept) if name in fields}))]

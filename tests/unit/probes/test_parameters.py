"""The parameter probe: a snapshot at every stage, rewrites detected, memory and records bounded."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.agent.writer import RecordWriter
from ddpcheck.probes import parameters
from ddpcheck.probes.digest import combine, make_digester
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.scan.scanner import Scan, TensorScanner
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.kinds.rank import EndRecord
from tests.helpers.fake_context import FakeContext, Job, watch
from tests.helpers.paths import ROOT


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


def leaves_now(module: nn.Module) -> list[bytes]:
    return make_digester("cpu").submit(list(module.parameters())).result()


def test_a_snapshot_at_every_stage(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    job.train(sgd(module), steps=3)
    recorded = [(record.stage, record.of, record.step) for record in context.of(DigestRecord)]
    assert recorded == [
        ("init.before", "parameters", -1),
        ("init.before", "buffers", -1),
        ("init.after", "parameters", -1),
        ("init.after", "buffers", -1),
        ("buffers", "buffers", 0),
        ("params", "parameters", 0),
        ("buffers", "buffers", 1),
        ("params", "parameters", 1),
        ("buffers", "buffers", 2),
        ("params", "parameters", 2),
    ]
    assert isinstance(context.records[0], ModuleRecord)


def test_buffers_in_the_hands_of_a_hook_are_not_compared(context: FakeContext) -> None:
    """They may be equal only after the backward."""
    module = net()
    module.buffer_hook = object()  # type: ignore[assignment]
    Job(module, context).wrapped().train(sgd(module), steps=2)
    assert "buffers" not in [record.stage for record in context.of(DigestRecord)]


def test_a_record_holds_the_digests_of_that_moment(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    job.train(sgd(module))
    leaves = leaves_now(module)
    record = context.digests(Stage.PARAMS)[0]
    assert record.root == combine(leaves).hex()
    assert unpack_leaves(record.leaves, record.width) == [leaf[: record.width] for leaf in leaves]
    assert (record.optimizer, record.forward) == (0, 1)
    wrapped = context.digests(Stage.INIT_AFTER)[0]
    assert len(unpack_leaves(wrapped.leaves, 8)) == len(leaves)
    assert record.root != wrapped.root


def test_one_changed_parameter_changes_its_leaf_alone(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    optimizer = torch.optim.SGD([module[2].bias], lr=0.1)
    job.train(optimizer, steps=2)
    one, two = (unpack_leaves(r.leaves, r.width) for r in context.digests(Stage.PARAMS))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 5 + [False]


def test_every_so_often(context: FakeContext) -> None:
    context = FakeContext(every=3)
    module = net()
    job = Job(module, context).wrapped()
    job.train(sgd(module), steps=8)
    assert [record.step for record in context.digests(Stage.PARAMS)] == [0, 3, 6]
    assert [record.step for record in context.digests(Stage.BUFFERS)] == [0, 3, 6]


def test_no_record_for_a_module_without_buffers(context: FakeContext) -> None:
    module = nn.Linear(2, 2)
    Job(module, context).wrapped().train(sgd(module))
    assert {record.of for record in context.digests(Stage.INIT_AFTER)} == {TensorKind.PARAMETERS.value}
    assert context.digests(Stage.BUFFERS) == []


def test_no_rewrite_without_a_write(context: FakeContext) -> None:
    module = net()
    Job(module, context).wrapped().train(torch.optim.AdamW(module.parameters()), steps=5)
    assert context.digests(Stage.REWRITTEN) == []


@torch.no_grad()
def in_place(module: nn.Module) -> None:
    module[2].weight.view(-1)[5].add_(1)


def load(module: nn.Module) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})


def through_data(module: nn.Module) -> None:
    module[0].weight.data.mul_(0.5)


def swapped_data(module: nn.Module) -> None:
    module[0].bias.data = torch.full_like(module[0].bias, 3.0)


@pytest.mark.parametrize("write", [in_place, load, through_data, swapped_data])
def test_a_write_between_two_steps_is_noticed(context: FakeContext, write: object) -> None:
    module = net()
    job = Job(module, context).wrapped()
    optimizer = sgd(module)
    job.train(optimizer, steps=2)
    write(module)  # type: ignore[operator]
    after = combine(leaves_now(module)).hex()
    job.train(optimizer, steps=2)
    (record,) = context.digests(Stage.REWRITTEN)
    assert (record.step, record.optimizer, record.root) == (2, 0, after)


def test_writes_are_looked_for_after_steps_that_the_budget_compares(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net()
    job = Job(module, context).wrapped()
    optimizer = sgd(module)
    monkeypatch.setattr(context.budget, "runs", lambda item, step: step % 4 == 0)
    for _ in range(6):
        job.train(optimizer)
        in_place(module)
    assert [record.step for record in context.digests(Stage.PARAMS)] == [0, 4]
    # After the compared steps 0 and 4.
    assert [record.step for record in context.digests(Stage.REWRITTEN)] == [1, 5]


def test_a_write_before_the_first_step_is_noticed(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    in_place(module)
    job.train(sgd(module))
    assert 0 in [record.step for record in context.digests(Stage.REWRITTEN)]


def test_an_update_by_hand_counts_as_a_step(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    for _ in range(3):
        job.forward()
        in_place(module)
    job.forward()
    context.emit(Probe.before_exit)
    assert [(record.step, record.optimizer) for record in context.digests(Stage.PARAMS)] == [
        (0, None),
        (1, None),
        (2, None),
    ]
    assert context.digests(Stage.PARAMS)[-1].root == combine(leaves_now(module)).hex()


def test_the_last_manual_update_is_recorded_at_the_end(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    job.forward()
    in_place(module)
    assert context.digests(Stage.PARAMS) == []
    context.emit(Probe.before_exit)
    assert [record.step for record in context.digests(Stage.PARAMS)] == [0]


def test_the_last_manual_update_is_recorded_when_the_wrapper_is_released(context: FakeContext) -> None:
    """As when the function that made it returns."""
    module = net()
    job = Job(module, context).wrapped()
    job.forward()
    in_place(module)
    context.emit(Probe.wrapper_released, job.tracked)
    assert [record.step for record in context.digests(Stage.PARAMS)] == [0]


def test_no_record_for_a_wrapper_whose_module_was_wrapped_again(context: FakeContext) -> None:
    """Ranks may release the wrapper at different times."""
    module = net()
    job = Job(module, context).wrapped()
    job.forward()
    again = watch(module, index=1)
    context.emit(Probe.before_wrap, again)
    context.emit(Probe.after_wrap, again)
    in_place(module)
    context.emit(Probe.wrapper_released, job.tracked)
    assert context.digests(Stage.PARAMS) == []


@torch.no_grad()
def disturb(module: nn.Module, by: float) -> None:
    for parameter in module.parameters():
        parameter.add_(by)


def test_weights_disturbed_before_the_first_step_are_no_update(context: FakeContext) -> None:
    """Training at perturbed weights (SAM): each rank may perturb them differently, and restores them."""
    module = net()
    job = Job(module, context).wrapped()
    job.forward()
    disturb(module, 0.5)
    job.forward()
    disturb(module, -0.5)
    job.train(sgd(module), steps=2)
    context.emit(Probe.before_exit)
    recorded = [(record.step, record.optimizer) for record in context.digests(Stage.PARAMS)]
    assert recorded == [(0, 0), (1, 0)]


def test_weights_put_back_are_no_update(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        job.forward()
        disturb(module, 0.5)
        job.forward()
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.data.copy_(value)
    job.forward()
    context.emit(Probe.before_exit)
    assert context.digests(Stage.PARAMS) == []


def test_manual_updates_that_bypass_the_wrapper_are_recorded(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    job.forward()
    for _ in range(3):
        in_place(module)
        context.emit(Probe.unsynced_backward_begun, job.tracked)
    assert [record.step for record in context.digests(Stage.PARAMS)] == [0, 1, 2]


def test_evaluation_is_no_training(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    with torch.no_grad():
        job.forward()
    assert job.tracked.forwards == 0
    assert context.digests(Stage.BUFFERS) == []


def test_two_optimizers_on_one_module_read_their_own_part(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net()
    job = Job(module, context).wrapped()
    body = torch.optim.SGD([*module[0].parameters(), *module[1].parameters()], lr=0.1)
    head = torch.optim.SGD(module[2].parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.forward()
    job.step(body)
    job.step(head)
    read: list[int] = []
    real = TensorScanner.scan

    def counting(
        scanner: TensorScanner, tensors: Any, digest: bytes = b"", *args: Any, **kwargs: Any
    ) -> Scan:
        if not args and not kwargs:
            read.append(sum(digest))
        return real(scanner, tensors, digest, *args, **kwargs)

    monkeypatch.setattr(parameters.TensorScanner, "scan", counting)
    job.step(body)
    assert context.digests(Stage.PARAMS)[-1].root == combine(leaves_now(module)).hex()
    job.step(head)
    assert context.digests(Stage.PARAMS)[-1].root == combine(leaves_now(module)).hex()
    assert read == [4, 2]
    assert [(r.step, r.optimizer) for r in context.digests(Stage.PARAMS)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


class NoPeers:
    """An exchange in which no other rank publishes anything: a mismatch is never known in time."""

    def publish(self, *values: object) -> int:
        return 0

    def new_entries(self) -> list[Any]:
        return []


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_on_a_device_steps_without_a_reduction_are_compared_where_they_are_used(
    device: bool, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "on_device", lambda tensor: device)
    context = FakeContext(exchange=NoPeers())
    module = nn.Linear(4, 2)
    module.require_backward_grad_sync = reduced  # type: ignore[assignment]
    job = Job(module, context, [parameters.ParameterProbe]).wrapped()
    optimizer = sgd(module)
    averages = []
    for step in range(3):
        job.forward(torch.ones(3, 4)).sum().backward()
        job.step(optimizer)
        for parameter in module.parameters():
            parameter.data.fill_(step)
        averages.append(combine(leaves_now(module)).hex())
    job.forward()
    used = [(record.step, record.root) for record in context.digests(Stage.USED)]
    assert used == (list(enumerate(averages)) if device and not reduced else [])


def test_frozen_parameters_are_included(context: FakeContext) -> None:
    module = net()
    module[0].requires_grad_(False)
    job = Job(module, context).wrapped()
    job.train(torch.optim.SGD(module[2].parameters(), lr=0.1))
    assert len(unpack_leaves(context.digests(Stage.PARAMS)[0].leaves, 2)) == 6


def test_the_users_tensors_are_not_kept_alive(context: FakeContext) -> None:
    module = net()
    job = Job(module, context).wrapped()
    job.train(sgd(module), steps=2)
    weakref.finalize(module, job.tracked.forget)
    tensors = [weakref.ref(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    del module, job.module
    gc.collect()
    assert [tensor() for tensor in tensors if tensor() is not None] == []


def test_random_numbers_and_gradients_do_not_change(context: FakeContext) -> None:
    module = net()
    state = torch.get_rng_state()
    job = Job(module, context).wrapped()
    job.train(sgd(module), steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(p.grad, torch.full_like(p, 0.25)) for p in module.parameters() if p.grad is not None
    )


def large() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])


def test_two_hundred_parameters_write_less_than_a_kilobyte_a_step(tmp_path: Path) -> None:
    """With the records written once, a schedule that changes at every step, and the blocks of the writer."""

    class Written(FakeContext):
        writer = RecordWriter(tmp_path / "rank-00000.jsonl")

        def write(self, record: object) -> None:
            self.writer.write(record)  # type: ignore[arg-type]

    context = Written()
    module = large()
    assert len(list(module.parameters())) == 200
    job = Job(module, context).wrapped()
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(200):
        job.train(optimizer)
        schedule.step()
    context.emit(Probe.before_exit)
    context.writer.close(EndRecord("exit", 0.0))
    size = context.writer.path.stat().st_size
    # The leaves alone, which cannot be compressed, are 400 bytes.
    assert 200 * 400 < size <= 200 * 1024, size


def test_memory_does_not_grow_with_steps() -> None:
    class Forgetful(FakeContext):
        def write(self, record: object) -> None:
            pass

    module = net()
    # Under the budget, what is kept of the last step depends on its time.
    job = Job(module, Forgetful(budget="off")).wrapped()
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    def train(steps: int) -> None:
        for _ in range(steps):
            job.train(optimizer)
            schedule.step()

    train(20)
    gc.collect()
    tracemalloc.start()
    held = []
    for steps in (50, 400):
        train(steps)
        gc.collect()
        # torch itself keeps a little of every step.
        ours = [tracemalloc.Filter(True, f"{ROOT / folder}/*") for folder in ("ddpcheck", "probes")]
        traces = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        held.append(sum(trace.size for trace in traces))
    tracemalloc.stop()
    # The state of the last step was allocated after the start, both times.
    assert held[0] > 0
    # The times of the last steps are written in batches of varying size. Anything that is kept of every step takes more
    # than 20 bytes.
    assert held[1] - held[0] < 20 * 400, held


class Cached(nn.Module):
    """Statistics that are in a checkpoint, and a cache that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def trained_with_buffers(context: FakeContext) -> tuple[Cached, Job]:
    module = Cached()
    job = Job(module, context).wrapped()
    optimizer = sgd(module)
    for _ in range(3):
        optimizer.zero_grad()
        job.forward(torch.randn(8, 4)).square().mean().backward()
        job.step(optimizer)
    return module, job


def recompute(module: Cached, job: Job) -> None:
    with torch.no_grad():
        module(torch.randn(8, 4))


def replace_statistics(module: Cached, job: Job) -> None:
    module.norm.running_mean = torch.ones(4)


@pytest.mark.parametrize("write", [recompute, replace_statistics])
def test_buffers_written_after_the_last_step_are_recorded_at_the_end(
    context: FakeContext, write: Any
) -> None:
    module, job = trained_with_buffers(context)
    write(module, job)
    context.emit(Probe.before_exit)
    (record,) = context.digests(Stage.BUFFERS_END)
    assert (record.of, record.step, record.width) == ("buffers", -1, 8)


def test_at_the_end_only_persistent_buffers_count(context: FakeContext) -> None:
    module, job = trained_with_buffers(context)
    assert [job.tracked.buffers[index].name for index in job.tracked.checkpointed_buffers()] == [
        "norm.running_mean",
        "norm.running_var",
    ]
    module.norm.running_mean.add_(1)
    context.emit(Probe.before_exit)
    before = context.digests(Stage.BUFFERS)[-1]
    (record,) = context.digests(Stage.BUFFERS_END)
    names = [slot.name for slot in job.tracked.buffers]
    cache = names.index("cache")
    assert unpack_leaves(record.leaves, 8)[cache][:1] == unpack_leaves(before.leaves, 1)[cache]


def evaluate(module: Cached, job: Job) -> None:
    module.eval()
    recompute(module, job)


def train_without_a_step(module: Cached, job: Job) -> None:
    """As at the end of gradient accumulation."""
    job.forward(torch.randn(8, 4)).sum().backward()


def leave_alone(module: Cached, job: Job) -> None:
    pass


@pytest.mark.parametrize("write", [evaluate, train_without_a_step, leave_alone])
def test_statistics_of_the_last_training_forwards_may_differ(context: FakeContext, write: Any) -> None:
    write(*trained_with_buffers(context))
    context.emit(Probe.before_exit)
    assert context.digests(Stage.BUFFERS_END) == []


@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_that_ddp_does_not_sync_are_recorded_at_the_end(context: FakeContext, option: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module.register_buffer("codes", torch.rand(3))
    job = Job(module, context).wrapped()
    job.tracked.options[option] = False
    job.train(sgd(module), steps=2)
    before = context.digests(Stage.BUFFERS)[-1]
    module.codes.add_(1)  # type: ignore[operator]
    module[1].running_mean.add_(1)  # type: ignore[operator]
    job.forward()
    context.emit(Probe.before_exit)
    (record,) = context.digests(Stage.BUFFERS_END)
    assert record.how == "not_synced"
    now = unpack_leaves(record.leaves, record.width)
    names = [slot.name for slot in job.tracked.buffers]
    then = unpack_leaves(before.leaves, before.width)
    assert now[names.index("codes")][:1] != then[names.index("codes")]
    assert before.root != record.root


def test_a_module_run_in_another_ones_step_is_still_training(context: FakeContext) -> None:
    """The discriminator of a GAN, called without its wrapper while the generator trains."""
    module, _ = trained_with_buffers(context)
    generator = nn.Linear(4, 4)
    other = Job(generator, context)
    other.tracked.index = 1
    module(generator(torch.randn(8, 4))).sum().backward()
    optimizer = sgd(generator)
    other.step(optimizer)
    context.emit(Probe.before_exit)
    assert context.digests(Stage.BUFFERS_END) == []


def test_buffers_are_recorded_when_the_wrapper_is_released(context: FakeContext) -> None:
    """A training function returns before the process group is destroyed."""
    module, job = trained_with_buffers(context)
    recompute(module, job)
    job.dispatcher._release(job.tracked)
    context.emit(Probe.before_exit)
    assert len(context.digests(Stage.BUFFERS_END)) == 1
    assert job.tracked.buffers == []


def test_buffers_are_not_compared_after_a_captured_forward(context: FakeContext) -> None:
    """Replays change the statistics of each rank, and no hook counts them as forwards."""
    module, job = trained_with_buffers(context)
    recompute(module, job)
    context.captured = True
    context.emit(Probe.before_exit)
    assert context.digests(Stage.BUFFERS_END) == []


def test_no_snapshot_after_the_end(context: FakeContext) -> None:
    module, job = trained_with_buffers(context)
    context.emit(Probe.before_exit)
    recompute(module, job)
    job.dispatcher._release(job.tracked)
    assert context.digests(Stage.BUFFERS_END) == []

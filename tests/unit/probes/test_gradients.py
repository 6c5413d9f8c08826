"""The gradient probe: what it writes, how often it reads, and that it does not change gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ddpcheck.agent.shm_exchange import ShmExchange, create_exchange
from ddpcheck.probes import gradients
from ddpcheck.probes.digest import combine, submit
from ddpcheck.probes.gradients import FIRST_STEPS, GradientProbe
from ddpcheck.probes.parameters import ParameterProbe
from ddpcheck.probes.probe import BudgetItem, Probe
from ddpcheck.probes.scan.library import scan_library
from ddpcheck.probes.scan.scanner import Scan, TensorScanner
from ddpcheck.probes.scan.table import LARGE
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.codecs import distribute, unpack
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.registry import to_line
from tests.helpers.fake_context import FakeContext, Job


class Many(nn.Module):
    """A module with any number of parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(7)) for _ in range(count))

    def forward(self, x: torch.Tensor, without: Sequence[int] = ()) -> torch.Tensor:
        return torch.stack([(p * x).sin().sum() for n, p in enumerate(self.parts) if n not in without]).sum()


class Watched:
    """A module in training with the gradient probe alone."""

    def __init__(self, module: nn.Module, **config: Any) -> None:
        self.context = FakeContext(**config)
        self.job = Job(module, self.context, [GradientProbe]).wrapped()
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def backward(self, *inputs: Any, scale: float = 1.0) -> Watched:
        self.optimizer.zero_grad()
        (self.job.forward(*inputs) * scale).sum().backward()
        return self

    def step(self) -> Watched:
        self.job.step(self.optimizer)
        return self

    @property
    def backwards(self) -> list[BackwardRecord]:
        return self.context.of(BackwardRecord)

    @property
    def applied(self) -> list[AppliedRecord]:
        return self.context.of(AppliedRecord)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs() -> torch.Tensor:
    return torch.randn(7)


def test_a_step_is_two_records() -> None:
    tracked = Watched(Many(5)).backward(inputs()).step()
    (backward,), (applied,) = tracked.backwards, tracked.applied
    assert (backward.number, backward.step, backward.absent, backward.divisor) == (1, 0, [], 0)
    expected = [sketch(p.grad).value for p in tracked.module.parameters() if p.grad is not None]
    assert [one.value for one in unpack(backward.local)] == pytest.approx(expected, rel=1e-6)
    # This is rank 0 of two.
    share = [
        expected[index] for index in distribute(tuple(p.numel() for p in tracked.module.parameters()), 2)[0]
    ]
    assert [one.value for one in unpack(backward.reduced)] == pytest.approx(share, rel=1e-6)
    assert (applied.step, applied.last, applied.synced, applied.unsynced) == (0, "synced", 1, 0)
    assert (applied.moved, applied.reason, applied.nonfinite) == (False, "", {})


def test_records_are_small() -> None:
    """200 parameters, two ranks: at most 2 KB per step, even if every step is sketched."""
    tracked = Watched(Many(200), sketch_every=1)
    for _ in range(100):
        tracked.backward(inputs()).step()
    assert (len(tracked.backwards), len(tracked.applied)) == (100, 100)
    assert sum(len(to_line(record)) for record in tracked.context.records) / 100 <= 2048


def test_later_steps_are_sketched_now_and_then() -> None:
    tracked = Watched(Many(2), sketch_every=10)
    for _ in range(45):
        tracked.backward(inputs()).step()
    assert [record.step for record in tracked.backwards] == [*range(FIRST_STEPS), 10, 20, 30, 40]
    assert [record.step for record in tracked.applied] == list(range(45))


@pytest.mark.parametrize("every", [1, 3])
def test_only_every_so_many_steps(every: int) -> None:
    tracked = Watched(Many(2), every=every)
    for _ in range(7):
        tracked.backward(inputs()).step()
    assert [record.step for record in tracked.backwards] == list(range(0, 7, every))
    assert [record.step for record in tracked.applied] == list(range(0, 7, every))
    assert [record.number for record in tracked.backwards] == list(range(1, 8, every))


@pytest.mark.needs("library")
@pytest.mark.parametrize("count", [1, 300])
def test_a_stage_is_one_native_call_however_many_parameters(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return counted

    library = scan_library()
    assert library is not None
    for name in ("scan", "samples", "windows"):
        monkeypatch.setattr(library, name, counting(name, getattr(library, name)))
    module = Many(count)
    job = Job(module, FakeContext(budget="off"), [GradientProbe, ParameterProbe]).wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    # Before the first step, every forward looks for an update without an optimizer.
    job.forward(inputs()).backward()
    job.step(optimizer)
    for _ in range(FIRST_STEPS + 1):
        optimizer.zero_grad()
        calls.clear()
        job.forward(inputs()).backward()
        # Local gradients, reduced gradients.
        assert calls == {"scan": 2}
        calls.clear()
        job.step(optimizer)
        # Applied gradients, and parameters after the step; writes to parameters before it and after it.
        assert calls == {"scan": 2, "samples": 2}


class Counted:
    """Counts the reads of each gradient, by its address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Per scan: the gradients that it digests, sketches, and counts non-finite values of.
        self.scans: list[tuple[list[int], list[int], list[int]]] = []
        real = TensorScanner.scan

        def scan(
            scanner: TensorScanner,
            tensors: Sequence[torch.Tensor | None],
            digest: bytes = b"",
            sketch: bytes = b"",
            count: bytes = b"",
            only_sketchable: bool = False,
        ) -> Scan:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            masks = (digest, sketch, count)
            read = [[a for a, wanted in zip(addresses, mask, strict=False) if wanted] for mask in masks]
            self.scans.append((read[0], read[1], read[2]))
            return real(scanner, tensors, digest, sketch, count, only_sketchable)

        monkeypatch.setattr(TensorScanner, "scan", scan)

    @property
    def digested(self) -> list[int]:
        return [address for digested, _, _ in self.scans for address in digested]


@pytest.mark.parametrize("clipped", [False, True])
def test_three_passes(monkeypatch: pytest.MonkeyPatch, clipped: bool) -> None:
    counted = Counted(monkeypatch)
    tracked = Watched(Many(6)).backward(inputs())
    pointers = [p.grad.data_ptr() for p in tracked.module.parameters() if p.grad is not None]
    (computed, reduced) = counted.scans
    assert computed == ([], pointers, [])
    # Reduced gradients: one of two ranks also sketches half of them, in the same pass.
    assert (reduced[0], len(reduced[1]), reduced[2]) == (pointers, 3, [])
    if clipped:
        nn.utils.clip_grad_norm_(tracked.module.parameters(), 1e-3)
    tracked.step()
    assert counted.scans[2:] == [(pointers, [], [])]  # as applied


class Mixed(nn.Module):
    """A large parameter and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(LARGE // 4 + 1))
        self.small = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.large * 3).sum() + (self.small * x).sum()


def written_densely(module: Mixed) -> None:
    gradient_of(module.large).data.mul_(2)


def written_to_the_small_one(module: Mixed) -> None:
    gradient_of(module.small).data[3] = 5


def clipped(module: Mixed) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


def replaced(module: Mixed) -> None:
    module.large.grad = gradient_of(module.large).clone()


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("write", [None, written_densely, written_to_the_small_one, clipped, replaced])
def test_large_gradients_are_hashed_again_only_after_a_write(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Mixed], None] | None
) -> None:
    monkeypatch.setattr(gradients, "FIRST_STEPS", 0)
    counted = Counted(monkeypatch)
    module = Mixed()
    tracked = Watched(module).backward(inputs())
    if write is not None:
        write(module)
    large, small = (gradient_of(each).data_ptr() for each in module.parameters())
    applied = submit.submit([gradient_of(each) for each in module.parameters()]).result()
    counted.scans.clear()
    tracked.step()
    assert (large in counted.digested) == (write is not None)
    assert small in counted.digested
    # In both cases the record is that of the applied gradients.
    (record,) = tracked.applied
    assert record.root == combine(applied).hex()


def test_in_the_first_steps_all_gradients_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    module = Mixed()
    tracked = Watched(module)
    read_again = []
    for _ in range(FIRST_STEPS + 2):
        tracked.backward(inputs())
        counted.scans.clear()
        tracked.step()
        read_again.append(gradient_of(module.large).data_ptr() in counted.digested)
    assert read_again == [True] * FIRST_STEPS + [False] * 2


def test_between_sketches_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "FIRST_STEPS", 1)
    counted = Counted(monkeypatch)
    tracked = Watched(Many(6), sketch_every=20).backward(inputs()).step()
    counted.scans.clear()
    tracked.backward(inputs()).step()
    # Non-finite values of the local gradients, and digests of the applied ones.
    assert [tuple(map(len, scan)) for scan in counted.scans] == [(0, 0, 6), (6, 0, 0)]


def test_writes_to_gradients_are_detected() -> None:
    tracked = Watched(Many(3))
    tracked.backward(inputs()).step()
    tracked.backward(inputs())
    nn.utils.clip_grad_norm_(tracked.module.parameters(), 1e-3)
    tracked.step().backward(inputs()).step()
    first = next(tracked.module.parameters())
    tracked.backward(inputs())
    first.grad = torch.zeros(7)
    tracked.step()
    assert [record.moved for record in tracked.applied] == [False, True, False, True]


def test_applied_gradients_are_digested() -> None:
    tracked = Watched(Many(3))
    x = inputs()
    tracked.optimizer.param_groups[0]["lr"] = 0.0
    tracked.backward(x).step().backward(x).step().backward(x)
    list(tracked.module.parameters())[2].grad[6] += 1e-6  # type: ignore[index]
    tracked.step()
    one, two, three = (record.root for record in tracked.applied)
    assert one == two != three


def test_values_that_are_not_finite() -> None:
    tracked = Watched(Many(4))
    tracked.backward(torch.tensor([1.0, math.nan, 1.0, 1.0, math.inf, 1.0, 1.0])).step()
    (backward,), (applied,) = tracked.backwards, tracked.applied
    counts = {str(index): 2 for index in range(4)}
    assert (backward.local_nonfinite, applied.nonfinite) == (counts, counts)
    assert backward.reduced_nonfinite == {"0": 2, "3": 2}  # this rank's share


def test_values_that_were_put_right_before_the_step() -> None:
    tracked = Watched(Many(2)).backward(torch.full((7,), math.inf))
    for parameter in tracked.module.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    tracked.step()
    assert tracked.backwards[0].reduced_nonfinite == {"0": 7}  # this rank's share
    assert (tracked.applied[0].moved, tracked.applied[0].nonfinite) == (True, {})


def test_a_nan_between_two_sketches_is_written_by_the_rank_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "FIRST_STEPS", 1)
    tracked = Watched(Many(2), sketch_every=20)
    tracked.backward(inputs()).step().backward(inputs()).step()
    tracked.backward(torch.full((7,), math.nan)).step()
    assert [record.step for record in tracked.backwards] == [0, 2]
    last = tracked.backwards[-1]
    assert (last.local, last.reduced, last.local_nonfinite) == ("", "", {"0": 7, "1": 7})
    assert tracked.applied[-1].nonfinite == {"0": 7, "1": 7}


def test_parameters_without_gradients() -> None:
    module = Many(4)
    module.find_unused_parameters = True  # type: ignore[assignment]
    tracked = Watched(module).backward(inputs(), [1, 2]).step()
    (backward,), (applied,) = tracked.backwards, tracked.applied
    assert backward.absent == [1, 2]
    local = unpack(backward.local)
    assert [index for index, one in enumerate(local) if one.norm == 0] == [1, 2]
    tracked.backward(inputs()).step()
    assert (tracked.backwards[1].absent, applied.last) == ([], "synced")


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_reduced_again(option: str) -> None:
    """DDP reduces the existing gradient of an unused parameter, and zeros only if there is none."""
    module = Many(3)
    setattr(module, option, True)
    tracked = Watched(module)
    tracked.job.forward(inputs(), [2]).backward()
    before = sketch(module.parts[1].grad)
    tracked.job.forward(inputs(), [1, 2]).backward()
    tracked.step()
    used, left_out, never = unpack(tracked.backwards[1].local)
    assert used.value == pytest.approx(sketch(module.parts[0].grad).value, rel=1e-6)
    assert left_out.value == pytest.approx(before.value, rel=1e-6)
    assert never.norm == 0
    assert tracked.backwards[1].absent == [2]


def test_no_extra_pass_if_every_parameter_must_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = Watched(Many(2))
    tracked.job.forward(inputs()).backward()
    counted = Counted(monkeypatch)
    tracked.job.forward(inputs()).backward()
    # Two parameters as computed, and one of them as reduced.
    assert [tuple(map(len, scan)) for scan in counted.scans] == [(0, 2, 0), (2, 1, 0)]


def test_budget_leaves_out_sketches_then_applied_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = Watched(Many(2))
    schedule = {BudgetItem.SKETCH: 4, BudgetItem.APPLIED: 2}
    monkeypatch.setattr(tracked.context.budget, "runs", lambda item, step: step % schedule.get(item, 1) == 0)
    counted = Counted(monkeypatch)
    for _ in range(8):
        tracked.backward(inputs()).step()
    assert [record.step for record in tracked.backwards] == [0, 4]
    # Without digests there is a record only where the backwards differ from those before.
    assert [(record.step, bool(record.root)) for record in tracked.applied] == [
        (step, True) for step in (0, 2, 4, 6)
    ]
    assert len(counted.scans) == 2 * 2 + 4
    tracked.step()
    tracked.backward(inputs()).step()
    assert [(record.step, bool(record.root), record.synced) for record in tracked.applied[4:]] == [
        (8, True, 0),
        (9, False, 1),
    ]


def test_a_reduction_that_never_ends_leaves_no_sketches() -> None:
    tracked = Watched(Many(3)).backward(inputs(), [2]).step()
    assert tracked.backwards == []
    assert (tracked.applied[0].last, tracked.applied[0].waiting) == ("unfinished", [2])


def test_frozen_parameters_are_absent() -> None:
    module = Many(3)
    module.parts[1].requires_grad_(False)
    assert Watched(module).backward(inputs()).step().backwards[0].absent == [1]


def test_gradients_by_hand() -> None:
    tracked = Watched(Many(2))
    tracked.job.train(tracked.optimizer, steps=2)
    assert tracked.backwards == []
    assert [(record.last, record.moved) for record in tracked.applied] == [("none", True)] * 2


def test_a_backward_around_the_wrapper() -> None:
    tracked = Watched(Many(2)).backward(inputs()).step()
    tracked.optimizer.zero_grad()
    tracked.module(inputs()).backward()
    tracked.step()
    last = tracked.applied[-1]
    assert (last.last, last.reason, last.synced, last.unsynced) == ("unsynced", "wrapper_bypassed", 0, 1)
    assert (last.moved, len(tracked.backwards)) == (True, 1)


def test_several_reduced_backwards_a_step() -> None:
    tracked = Watched(Many(2))
    for _ in range(3):
        tracked.job.forward(inputs()).backward()
    tracked.step()
    assert [(record.number, record.step) for record in tracked.backwards] == [(1, 0), (2, 0), (3, 0)]
    assert tracked.applied[0].synced == 3
    # Gradients add up: each is what the reducer got.
    grad = next(tracked.module.parameters()).grad
    assert grad is not None
    assert unpack(tracked.backwards[2].local)[0].value == pytest.approx(sketch(grad).value, rel=1e-6)


def test_sparse_gradients() -> None:
    module = nn.Embedding(10, 3, sparse=True)
    tracked = Watched(module).backward(torch.tensor([1, 4, 4])).step()
    (backward,), (applied,) = tracked.backwards, tracked.applied
    dense = torch.zeros(10, 3)
    dense[1], dense[4] = 1.0, 2.0
    assert unpack(backward.local)[0].value == pytest.approx(sketch(dense).value, rel=1e-6)
    assert (backward.absent, applied.moved) == ([], False)
    tracked.backward(torch.tensor([2])).step()
    assert tracked.applied[0].root != tracked.applied[1].root


def test_an_optimizer_records_its_own_parameters() -> None:
    module = Many(2)
    tracked = Watched(module)
    tracked.optimizer = torch.optim.SGD([module.parts[0]], lr=0.1)
    x = inputs()
    roots = []
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.parts[0].fill_(0.5)
            module.parts[1].fill_(value)
        module.zero_grad()
        tracked.job.forward(x).backward()
        tracked.step()
        roots.append(tracked.applied[-1].root)
    assert roots[0] == roots[1]


def test_off_means_off() -> None:
    tracked = Watched(Many(2), gradients="off").backward(inputs()).step()
    assert tracked.context.records == []
    assert not any(p._post_accumulate_grad_hooks for p in tracked.module.parameters())


def test_a_group_that_divides_by_those_that_are_left() -> None:
    tracked = Watched(Many(1))
    tracked.job.tracked.joined = True
    tracked.backward(inputs()).step()
    tracked.module._divide_by_initial_world_size = False  # type: ignore[assignment]
    tracked.backward(inputs()).step()
    assert [record.divisor for record in tracked.backwards] == [0, -1]


def test_gradients_generators_and_versions_stay_as_they_are() -> None:
    def train(module: Many, job: Job | None) -> tuple[list[bytes], list[int], torch.Tensor]:
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        seen, versions = [], []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            (job.forward(inputs()) if job else module(inputs())).backward()
            if job:
                job.dispatcher.before_step(optimizer)
            for parameter in module.parameters():
                assert parameter.grad is not None
                seen.append(parameter.grad.numpy().tobytes())
                versions += [parameter.grad._version, parameter._version]
            optimizer.step()
            if job:
                job.dispatcher.after_step(optimizer)
        return seen, versions, torch.get_rng_state()

    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        modules.append(Many(4))
        for parameter in modules[-1].parameters():
            parameter.grad = torch.zeros(7)
    context = FakeContext()
    alone = train(modules[0], None)
    under = train(modules[1], Job(modules[1], context, [GradientProbe]).wrapped())
    assert alone[:2] == under[:2]
    assert torch.equal(alone[2], under[2])
    assert len(context.of(AppliedRecord)) == 3


class Behind:
    """A device that is behind: reading its results too early would wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = False
        self.may_wait = False
        monkeypatch.setattr(Scan, "ready", lambda _: self.arrived)
        for name in ("leaves", "numbers"):
            monkeypatch.setattr(Scan, name, self._checked(getattr(Scan, name)))

    def _checked(self, real: Callable[[Scan], Any]) -> Callable[[Scan], Any]:
        def read(scan: Scan) -> Any:
            assert self.arrived or self.may_wait, "the training loop waited for the device"
            return real(scan)

        return read


def test_nothing_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Behind(monkeypatch)
    tracked = Watched(Many(3))
    for _ in range(3):
        tracked.backward(inputs()).step()
    assert tracked.context.records == []
    behind.arrived = True
    tracked.backward(inputs())
    assert [type(record) for record in tracked.context.records] == [BackwardRecord, AppliedRecord] * 3
    assert [record.step for record in tracked.backwards] == [0, 1, 2]
    assert [record.step for record in tracked.applied] == [0, 1, 2]


def test_pending_digests_are_awaited_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = Behind(monkeypatch)
    tracked = Watched(Many(3)).backward(inputs()).step().backward(inputs()).step()
    assert tracked.context.records == []
    behind.may_wait = True
    tracked.context.emit(Probe.before_exit)
    assert ([record.step for record in tracked.backwards], len(tracked.applied)) == ([0, 1], 2)


def test_a_second_step_has_no_backward() -> None:
    tracked = Watched(Many(2)).backward(inputs()).step().step().backward(inputs()).step()
    assert [(record.synced, record.last) for record in tracked.applied] == [
        (1, "synced"),
        (0, "synced"),
        (1, "synced"),
    ]


def test_values_that_are_not_finite_come_in_the_order_of_the_backward() -> None:
    tracked = Watched(nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2)))
    tracked.backward(inputs(), scale=math.nan).step()
    (backward,) = tracked.backwards
    indices = list(map(int, backward.local_nonfinite))
    # The loss comes after the last layer.
    assert sorted(indices[:2]) == [2, 3]
    assert sorted(indices) == [0, 1, 2, 3]


class Wrapping(nn.Module):
    """The gradients of all its parameters are wrappers, because one parameter is a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
        self.plain = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) @ self.wrapped


def test_gradients_that_are_wrappers_have_no_memory_to_sketch(tmp_path: Path) -> None:
    tracked = Watched(
        Wrapping(), folder=tmp_path, save_gradients="0:", exchange=ShmExchange(made(tmp_path), 0)
    )
    for _ in range(FIRST_STEPS + 2):
        tracked.backward(torch.ones(2, 3)).step()
    assert tracked.backwards[0].absent == [0, 1, 2]
    assert len({record.root for record in tracked.applied}) == len(tracked.applied)


def made(folder: Path) -> Path:
    create_exchange(folder / "board")
    return folder / "board"

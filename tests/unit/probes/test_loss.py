"""The loss of each step: the scalars on which backward was called, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from ddpcheck.probes.loss import MAX_PENDING, STEPS_PER_RECORD, LossProbe, read_scalar
from ddpcheck.probes.probe import Probe
from ddpcheck.records.kinds.modules import LossRecord
from tests.helpers.fake_context import FakeContext, Job
from tests.helpers.nested_backward import inside_backward


class Rank:
    """A job with the probe alone; backward events are emitted without a backward."""

    def __init__(self) -> None:
        self.context = FakeContext()
        module = torch.nn.Linear(2, 1)
        self.job = Job(module, self.context, [LossProbe]).wrapped()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def backward(self, root: object, weights: object = None) -> None:
        self.job.dispatcher.backward_called(root, weights)
        self.job.dispatcher.backward_returned(root, weights)

    def step(self) -> None:
        self.job.step(self.optimizer)

    def losses(self) -> list[tuple[int, int, list[float | str | None]]]:
        self.context.emit(Probe.before_exit)
        return [(one.optimizer, one.step, one.values) for one in self.context.of(LossRecord)]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    # A slow machine writes more often.
    monkeypatch.setattr("ddpcheck.probes.loss.NS_PER_RECORD", 10**18)
    return Rank()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_scalar_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    for value in (0.1, -3.25e-3, 1.0, 0.0, 60000.0):
        tensor = torch.tensor([7.0, value], dtype=dtype, requires_grad=True)[1]
        scalar = read_scalar(tensor)
        assert scalar is not None
        assert scalar.ready()
        assert scalar.value() == tensor.item()


def test_other_roots_are_not_read() -> None:
    class Mine(torch.Tensor):
        pass

    others = (
        torch.ones(2),
        torch.tensor(1),
        torch.tensor(1j),
        torch.nn.Parameter(torch.ones(())),
        torch.ones(()).as_subclass(Mine),
        torch.ones((), device="meta"),
        torch.ones(1).to_sparse(),
        torch.tensor([1j]).conj().imag,
        [torch.ones(())],
        None,
    )
    assert [read_scalar(other) for other in others] == [None] * len(others)


def test_steps_that_follow_each_other_share_a_record(rank: Rank) -> None:
    for step in range(STEPS_PER_RECORD + 2):
        rank.backward(torch.tensor(step / 3))
        rank.step()
    first, second = rank.losses()
    assert first == (
        0,
        0,
        [float(f"{torch.tensor(step / 3).item():.9g}") for step in range(STEPS_PER_RECORD)],
    )
    assert second[1] == STEPS_PER_RECORD
    assert len(second[2]) == 2


def test_nine_digits_bring_every_float_back(rank: Rank) -> None:
    value = torch.tensor(0.1) * 3
    rank.backward(value)
    rank.step()
    [(_, _, [losses])] = rank.losses()
    assert torch.tensor(losses).equal(value)


def test_micro_batches_add_up_as_their_gradients_do(rank: Rank) -> None:
    for value in (0.5, 0.25, 1.0):
        rank.backward(torch.tensor(value))
    rank.step()
    assert rank.losses() == [(0, 0, [1.75])]


def test_one_backward_that_cannot_be_read_leaves_the_step_unknown(rank: Rank) -> None:
    rank.backward(torch.tensor(0.5))
    rank.backward(torch.ones(3))
    rank.step()
    rank.backward(torch.tensor(0.5), torch.tensor(2.0))
    rank.step()
    rank.backward(torch.tensor(0.5))
    rank.step()
    assert rank.losses() == [(0, 0, [None, None, 0.5])]


def test_a_nested_backward_does_not_count(rank: Rank) -> None:
    rank.job.dispatcher.backward_called(torch.tensor(0.5))
    inside_backward(lambda: rank.backward(torch.tensor(100.0)))
    rank.job.dispatcher.backward_returned()
    rank.step()
    assert rank.losses() == [(0, 0, [0.5])]


def test_a_backward_that_raised_does_not_hide_the_next(rank: Rank) -> None:
    rank.job.dispatcher.backward_called(torch.tensor(8.0))
    rank.step()
    rank.job.forward()
    rank.backward(torch.tensor(0.5))
    rank.step()
    assert rank.losses() == [(0, 0, [8.0, 0.5])]


def test_non_finite_losses_are_written_as_text(rank: Rank) -> None:
    for value in (math.nan, math.inf, -math.inf):
        rank.backward(torch.tensor(value))
        rank.step()
    assert rank.losses() == [(0, 0, ["nan", "inf", "-inf"])]


def test_a_step_without_a_backward_has_no_loss(rank: Rank) -> None:
    rank.step()
    rank.backward(torch.tensor(1.0))
    rank.step()
    assert rank.losses() == [(0, 1, [1.0])]


def test_a_scale_is_taken_out_again(rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rank.backward(scaler.scale(torch.tensor(0.5)))
    rank.job.dispatcher.scaler_before(scaler, rank.optimizer)
    rank.step()
    rank.backward(torch.tensor(0.25))
    rank.step()
    assert rank.losses() == [(0, 0, [0.5, 0.25])]


def test_an_unknown_scale_gives_no_loss(rank: Rank) -> None:
    rank.backward(torch.tensor(512.0))
    tracked = rank.job.dispatcher._tracked(rank.optimizer)
    assert tracked is not None
    tracked.scaled, tracked.scale = True, None
    rank.step()
    assert rank.losses() == [(0, 0, [None])]


def test_a_step_that_the_scaler_leaves_out_takes_its_loss_with_it(rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    rank.backward(scaler.scale(torch.tensor(math.inf)))
    rank.job.dispatcher.scaler_before(scaler, rank.optimizer)
    rank.job.dispatcher.scaler_after(scaler, rank.optimizer)
    rank.backward(torch.tensor(0.5))
    rank.step()
    assert rank.losses() == [(0, 0, [0.5])]


def test_two_optimizers_have_a_loss_each(rank: Rank) -> None:
    other = torch.optim.SGD(rank.job.module.parameters(), lr=0.1)
    for step in range(2):
        rank.backward(torch.tensor(float(step)))
        rank.step()
        rank.backward(torch.tensor(10.0 + step))
        rank.job.step(other)
    assert [(optimizer, values) for optimizer, _, values in rank.losses()] == [
        (0, [0.0, 1.0]),
        (1, [10.0, 11.0]),
    ]


class Late:
    """A number that a device sends late."""

    def __init__(self, number: float, there: list[bool]) -> None:
        self.number, self.there = number, there

    def ready(self) -> bool:
        return self.there[0]

    def value(self) -> float:
        assert self.there[0], "somebody waits for the device"
        return self.number


def test_no_wait_for_a_device(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [False]
    monkeypatch.setattr("ddpcheck.probes.loss.read_scalar", lambda root: Late(float(root), there))
    for step in range(MAX_PENDING + 3):
        rank.backward(step)
        rank.step()
    there[0] = True
    rank.backward(1000)
    rank.step()
    losses = [value for _, _, values in rank.losses() for value in values]
    # The oldest were dropped; the rest arrived at the end.
    assert losses == [None] * 3 + [float(step) for step in range(3, MAX_PENDING + 3)] + [1000.0]

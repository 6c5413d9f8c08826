"""How the loss is computed, as the end of its graph shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpcheck.probes.loss_form import MOST_RECORDS, LossFormProbe
from ddpcheck.probes.losses.graph import (
    FIRST_STEPS,
    LossTerm,
    function_of,
    loss_terms,
    settings_of,
    targets_of,
)
from ddpcheck.records.kinds.state import LossFormRecord, LossSettingsRecord
from tests.helpers.fake_context import FakeContext, Job

LABELS = torch.tensor([0, 1, 0])


def outputs() -> torch.Tensor:
    return torch.ones(3, 2, requires_grad=True) * 1.5


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda out: F.cross_entropy(out, LABELS), [("NllLoss", "mean", 1.0)]),
        (lambda out: F.cross_entropy(out, LABELS, reduction="sum") / 4, [("NllLoss", "sum", 0.25)]),
        (lambda out: -(out.square().mean() * 3) / 2, [("reduction", "mean", 1.5)]),
        (lambda out: out.sum() * 0.0, [("reduction", "sum", 0.0)]),
        (
            lambda out: (F.cross_entropy(out, LABELS) + 0.1 * out.square().mean()) / 2,
            [("NllLoss", "mean", 0.5), ("reduction", "mean", 0.05)],
        ),
        (lambda out: out.mean() * out.sum(), [("Mul", "", 1.0)]),
        (
            lambda out: torch.tensor(2.0, requires_grad=True) * out.sum().detach(),
            [("AccumulateGrad", "", 2.0)],
        ),
    ],
)
def test_terms_of_a_loss(
    loss: Callable[[torch.Tensor], torch.Tensor], expected: list[tuple[str, str, float]]
) -> None:
    terms = loss_terms(loss(outputs()).grad_fn)
    if expected[0][0] == "AccumulateGrad":
        assert [term.function for term in terms] == ["AccumulateGrad"]
        return
    assert [(term.function, term.reduction) for term in terms] == [each[:2] for each in expected]
    assert [term.factor for term in terms] == pytest.approx([each[2] for each in expected])


def test_a_factor_that_is_not_a_number_is_not_known() -> None:
    out = outputs()
    assert loss_terms((out.mean() * float("inf")).grad_fn) == [LossTerm("reduction", "mean", None)]
    assert loss_terms((out.mean() / 0.0).grad_fn) == [LossTerm("reduction", "mean", None)]
    assert loss_terms(None) == []
    whole = out.mean()
    for _ in range(20):
        whole = whole + out.mean()
    assert loss_terms(whole.grad_fn) == []


SMOOTHED = {"label_smoothing": 0.1, "ignore_index": 1}


@pytest.mark.parametrize(
    ("loss", "function", "expected"),
    [
        (
            lambda out: F.cross_entropy(out, LABELS) / 2,
            "NllLoss",
            {"ignore_index": -100, "label_smoothing": 0.0, "weight": ""},
        ),
        (lambda out: F.cross_entropy(out, LABELS, **SMOOTHED) / 2, "NllLoss", SMOOTHED),
        (lambda out: F.cross_entropy(out, LABELS, reduction="sum", **SMOOTHED), "NllLoss", SMOOTHED),
        (lambda out: F.cross_entropy(out, LABELS, reduction="none", **SMOOTHED).mean(), "NllLoss", SMOOTHED),
        (
            lambda out: F.cross_entropy(out, LABELS, weight=torch.tensor([1.0, 3.0]), label_smoothing=0.2),
            "NllLoss",
            {"label_smoothing": 0.2},
        ),
        (
            lambda out: F.cross_entropy(out.view(1, 2, 3), LABELS.view(1, 3), **SMOOTHED),
            "NllLoss2D",
            SMOOTHED,
        ),
        (lambda out: F.huber_loss(out, torch.zeros(3, 2), delta=0.5), "HuberLoss", {"delta": 0.5}),
        (
            lambda out: F.smooth_l1_loss(out, torch.zeros(3, 2), reduction="none").sum(),
            "SmoothL1Loss",
            {"beta": 1.0},
        ),
        (
            lambda out: F.binary_cross_entropy_with_logits(out, torch.zeros(3, 2)),
            "BinaryCrossEntropyWithLogits",
            {"pos_weight": ""},
        ),
        (lambda out: out.square().mean(), "reduction", {}),
    ],
)
def test_settings_of_a_loss(
    loss: Callable[[torch.Tensor], torch.Tensor], function: str, expected: dict[str, object]
) -> None:
    (term,) = loss_terms(loss(outputs()).grad_fn)
    settings = settings_of(term)
    assert function_of(term) == function
    assert {name: settings[name] for name in expected} == expected
    assert (targets_of(term) is not None) == (function.startswith("NllLoss"))


def test_a_smoothed_loss_weighs_as_much_as_one_that_is_not() -> None:
    (term,) = loss_terms((F.cross_entropy(outputs(), LABELS, label_smoothing=0.1) / 4).grad_fn)
    assert term.form == LossTerm("NllLoss", "mean", 0.25)


def test_smoothing_by_hand_is_two_terms() -> None:
    out = outputs()
    by_hand = 0.9 * F.cross_entropy(out, LABELS) - 0.1 * out.log_softmax(1).sum(1).mean()
    assert [term.function for term in loss_terms(by_hand.grad_fn)] == ["NllLoss", "reduction"]


def test_weights_of_classes_are_a_digest() -> None:
    def weights(*values: float) -> object:
        loss = F.cross_entropy(outputs(), LABELS, weight=torch.tensor(values))
        return settings_of(loss_terms(loss.grad_fn)[0])["weight"]

    assert weights(1.0, 2.0) == weights(1.0, 2.0) != weights(2.0, 1.0)


def test_what_hooks_of_the_program_have_packed_is_not_unpacked() -> None:
    unpacked = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = F.cross_entropy(outputs(), LABELS, weight=torch.ones(2))
    (term,) = loss_terms(loss.grad_fn)
    assert settings_of(term) == {"ignore_index": -100, "label_smoothing": 0.0}
    assert targets_of(term) is None
    assert unpacked == []


class Training:
    def __init__(self) -> None:
        self.context = FakeContext()
        self.module = nn.Linear(3, 2)
        self.job = Job(self.module, self.context, probes=[LossFormProbe]).wrapped()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.steps = 0

    def step(self, factor: float, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            loss = F.cross_entropy(self.job.forward(torch.ones(3, 3)), LABELS) * factor
            self.job.dispatcher.backward_called(loss)
            loss.backward()
            self.job.dispatcher.backward_returned()
        self.job.step(self.optimizer)
        self.optimizer.zero_grad()
        self.steps += 1

    def records(self) -> list[tuple[int, list[str], list[float]]]:
        found = self.context.of(LossFormRecord)
        return [(record.step, record.reductions, record.factors) for record in found]


def test_a_form_counts_after_four_steps() -> None:
    training = Training()
    for _ in range(3):
        training.step(0.5, micro_batches=2)
    assert training.records() == []
    training.step(0.5, micro_batches=2)
    training.step(0.5, micro_batches=2)
    assert training.records() == [(0, ["mean"], [0.5])]


def test_weights_that_change_with_the_data_do_not_count() -> None:
    training = Training()
    for number in range(40):
        training.step(1 + number / 10)
    assert training.records() == []


def test_a_form_that_changes_ends_the_one_before() -> None:
    training = Training()
    for _ in range(5):
        training.step(0.5)
    for _ in range(FIRST_STEPS):
        training.step(2.0)
    assert training.records() == [(0, ["mean"], [0.5]), (5, [], []), (5, ["mean"], [2.0])]


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.probes.losses.graph.FIRST_STEPS", 10_000)
    training = Training()
    for number in range(8 * MOST_RECORDS):
        training.step(float(1 + number // 4 % 2))
    found = training.context.of(LossFormRecord)
    assert len(found) == MOST_RECORDS
    assert [record.last for record in found] == [False] * (MOST_RECORDS - 1) + [True]


def test_settings_are_written_when_they_have_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    for _ in range(4):
        training.step(0.5)
    # Weights that change with the data say nothing against the settings.
    training.step(0.6)
    (record,) = training.context.of(LossSettingsRecord)
    assert (record.step, record.functions) == (0, ["NllLoss"])
    assert record.settings == [{"ignore_index": -100, "label_smoothing": 0.0, "weight": ""}]

"""Labels from the data loader to the loss: mappings that always hold, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ddpcheck.probes.losses import labels
from ddpcheck.probes.losses.labels import LabelTracker, name_of
from ddpcheck.records.kinds.data import LabelsRecord

CLASSES = 4
Change = Callable[[int, torch.Tensor], torch.Tensor]


def batch(step: int, size: int = 16) -> torch.Tensor:
    return (torch.arange(size) + step) % CLASSES


def train(
    tracker: LabelTracker,
    change: Change,
    steps: Sequence[int] = range(8),
    returned: Any = None,
    size: int = 16,
) -> list[LabelsRecord]:
    records = []
    for step in steps:
        values = batch(step, size)
        tracker.returned(0, [torch.zeros(size, 2), values] if returned is None else returned(values))
        tracker.forward(3, step)
        outputs = torch.zeros(size, CLASSES + 1, requires_grad=True)
        tracker.backward_called(F.cross_entropy(outputs, change(step, values)))
        records += tracker.records()
    return records


def last(change: Change, **options: Any) -> LabelsRecord | None:
    tracker = LabelTracker()
    records = [*train(tracker, change, **options), *tracker.records(wait=True)]
    return next((record for record in reversed(records) if not record.ahead), None)


def test_labels_that_stay_as_they_are() -> None:
    record = last(lambda step, values: values)
    assert record is not None
    assert (record.loader, record.part, record.term, record.module, record.step) == (0, 0, 0, 3, 0)
    assert record.targets == {str(label): label for label in range(CLASSES)}


def test_another_mapping_from_some_step_on() -> None:
    record = last(lambda step, values: (values + 1) % CLASSES if step > 3 else values)
    assert record is not None
    assert record.step == 4
    assert record.targets == {str(label): (label + 1) % CLASSES for label in range(CLASSES)}


def test_labels_that_are_written_in_place() -> None:
    record = last(lambda step, values: values.add_(1))
    assert record is not None
    assert record.targets == {str(label): label + 1 for label in range(CLASSES)}


def test_a_mapping_that_ends_is_written_without_targets() -> None:
    tracker = LabelTracker()
    before = train(tracker, lambda step, values: values)
    after = train(tracker, lambda step, values: (values + step) % CLASSES, range(20, 26))
    assert [bool(record.targets) for record in before if not record.ahead] == [True]
    assert [bool(record.targets) for record in after if not record.ahead] == [False]


def test_drawn_labels_are_no_mapping() -> None:
    drawn = torch.Generator().manual_seed(1)

    def noisy(step: int, values: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(len(values), generator=drawn) < 0.1, 0, values)

    assert last(noisy, steps=range(64)) is None


def test_a_label_counts_in_several_batches_only() -> None:
    """Sorted data: one batch early, labels at the end of a class seem to become the next one."""
    tracker = LabelTracker()
    for step in range(8):
        tracker.returned(0, torch.full((64,), step))
        tracker.forward(0, step)
        tracker.backward_called(
            F.cross_entropy(torch.zeros(64, 12, requires_grad=True), torch.full((64,), step))
        )
    assert tracker.records(wait=True) == []


def test_a_loader_that_is_one_batch_ahead() -> None:
    tracker = LabelTracker()
    drawn = torch.Generator().manual_seed(2)
    batches = [torch.randint(CLASSES, (16,), generator=drawn) for _ in range(10)]
    tracker.returned(0, batches[0])
    for step in range(8):
        tracker.returned(0, batches[step + 1])
        tracker.forward(0, step)
        outputs = torch.zeros(16, CLASSES, requires_grad=True)
        tracker.backward_called(F.cross_entropy(outputs, batches[step]))
    (record,) = tracker.records(wait=True)
    assert (record.ahead, record.targets["1"]) == (1, 1)


def test_texts_appear_as_digests() -> None:
    record = last(
        lambda step, values: values, returned=lambda values: {"names": [f"c{v}" for v in values.tolist()]}
    )
    assert record is not None
    assert record.targets == {name_of(f"c{label}"): label for label in range(CLASSES)}
    assert not any("c1" in name for name in record.targets)


def test_targets_of_another_number_are_not_compared() -> None:
    assert last(lambda step, values: values, returned=lambda values: values[:-1]) is None


def test_all_ranks_write_the_same_labels_of_many() -> None:
    def of(first: int) -> set[str]:
        tracker = LabelTracker()
        for step in range(10):
            values = (torch.arange(600) + first) % 600
            for part in values.split(60):
                tracker.returned(0, part)
                tracker.forward(0, step)
                tracker.backward_called(F.cross_entropy(torch.zeros(60, 600, requires_grad=True), part))
                tracker.records()
        (record,) = [each for each in tracker.records(wait=True) if not each.ahead and each.targets]
        return set(record.targets)

    one, other = of(0), of(300)
    assert len(one) == len(other) == labels.MOST_PAIRS
    assert len(one & other) > labels.MOST_PAIRS / 2

"""Fingerprints of followed samples: the same indices everywhere, rows of batches, bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ddpcheck.probes.samples.contents import MOST_CHOSEN, SampleContents, chosen_indices
from ddpcheck.records.kinds.data import SamplesRecord


def followed(*batches: tuple[list[int], Any], length: int = 100) -> SamplesRecord | None:
    contents = SampleContents(chosen_indices(length))
    # Workers draw ahead.
    for indices, _ in batches:
        contents.drawn(indices)
    for _, batch in batches:
        contents.received(batch)
    return contents.record(0, 1, 2, 3)


def test_the_choice_depends_on_the_length_alone() -> None:
    state = random.getstate()
    chosen = chosen_indices(100_000)
    assert len(chosen) == MOST_CHOSEN
    assert chosen == chosen_indices(100_000)
    assert random.getstate() == state
    assert chosen_indices(3) == {0, 1, 2}
    assert chosen_indices(-1) == frozenset()


def test_a_sample_has_one_fingerprint_wherever_it_is() -> None:
    inputs, labels = torch.randn(6, 3, 4), torch.arange(6)
    one = followed(([0, 1, 2], (inputs[:3], labels[:3])), ([3, 4, 5], (inputs[3:], labels[3:])))
    turned = inputs.flip(0).transpose(1, 2).contiguous().transpose(1, 2)
    other = followed(([5, 4, 3, 2, 1, 0], [turned, labels.flip(0)]))
    assert one is not None
    assert other is not None
    assert one.kinds == other.kinds == "fi"
    assert one.indices == [0, 1, 2, 3, 4, 5]
    labels_of = [
        {index: digest[8:] for index, digest in zip(r.indices, r.digests, strict=True)} for r in (one, other)
    ]
    assert labels_of[0] == labels_of[1]
    assert len(set(one.digests)) == 6


@pytest.mark.parametrize(
    ("batch", "kinds"),
    [
        ({"ids": torch.ones(2, 5, dtype=torch.long), "label": torch.ones(2)}, "If"),
        ((["one", "two"], torch.ones(2, 1, dtype=torch.bool)), "ii"),
        ([torch.ones(2, 3), {"more": (torch.ones(2), 7)}], "ff"),
    ],
)
def test_parts_have_a_kind(batch: Any, kinds: str) -> None:
    record = followed(([4, 5], batch))
    assert record is not None
    assert record.kinds == kinds
    assert all(len(digest) == 8 * len(kinds) for digest in record.digests)


@pytest.mark.parametrize(
    "batches",
    [
        [([1, 2], torch.ones(3, 2))],
        [([1, 2], None)],
        [(["a", "b"], torch.ones(2, 2))],
        [([[1], [2]], torch.ones(2, 2))],
        [(7, torch.ones(1))],
        [([1, 2], torch.ones(2, device="meta"))],
        # A batch with other parts: rows are not samples.
        [([1, 2], torch.ones(2)), ([3, 4], (torch.ones(2), torch.ones(2)))],
    ],
)
def test_other_batches_are_not_followed(batches: Any) -> None:
    assert followed(*batches) is None


def test_the_number_of_samples_is_bounded() -> None:
    batches = [(list(range(at, at + 50)), torch.randn(50)) for at in range(0, 1000, 50)]
    record = followed(*[*batches, *batches, *batches], length=1000)
    assert record is not None
    assert MOST_CHOSEN <= len(record.indices) < MOST_CHOSEN + 50

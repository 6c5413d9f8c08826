"""Fingerprints of batches: equal for equal batches only, whatever their structure."""

from __future__ import annotations

from array import array
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddpcheck.probes.digest.device_copy import copy_to_host
from ddpcheck.probes.samples.fingerprint import (
    BUDGET,
    BatchContents,
    Fingerprint,
    FingerprintFuture,
    _as_bytes,
    _downsampled,
    fingerprint_batch,
    read_sampled,
)

Pair = namedtuple("Pair", "x y")


@dataclass
class Held:
    x: torch.Tensor
    note: str = ""


class Bag:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(*things: Any) -> Fingerprint:
    return fingerprint_batch(BatchContents(*things)).fingerprint()


STRUCTURES = [
    lambda x: x,
    lambda x: [x],
    lambda x: (x, None, 3),
    lambda x: {"input": {"deep": [x]}},
    lambda x: Pair(x, x + 1),
    lambda x: Held(x),
    lambda x: Bag(x),
    lambda x: UserDict(input_ids=x),
    lambda x: x.t(),
    lambda x: x[:, ::2],
    lambda x: x[:1].expand(5, -1),
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.complex(x, x).conj(),
    lambda x: x.numpy(),
    lambda x: torch.nn.Parameter(x),
    lambda x: x.requires_grad_() * 2,
]


@pytest.mark.parametrize("wrap", STRUCTURES)
def test_equal_for_equal_batches_only(wrap: Any) -> None:
    first, again, other = (of(wrap(numbers(seed, 6, 8))) for seed in (1, 1, 2))
    assert first == again
    assert first.digest != other.digest
    assert first.variety >= 4


@pytest.mark.parametrize("position", [0, 5_000_000, 9_999_999])
def test_a_large_tensor_is_sampled_from_end_to_end(position: int) -> None:
    batch = numbers(1, 10_000_000)
    before = of(batch)
    assert of(batch) == before
    assert len(read_sampled(batch, BUDGET)) <= BUDGET
    width = 80_000  # two windows apart
    start = min(max(0, position - width), len(batch) - 2 * width)
    batch[start : start + 2 * width] += 1
    assert of(batch).digest != before.digest


def test_the_bytes_read_are_bounded() -> None:
    contents = BatchContents([numbers(1, 500, 500) for _ in range(1000)])
    assert len(contents.tensors) <= 64
    taken = fingerprint_batch(contents)
    assert sum(map(len, taken._on_host)) <= 2 * BUDGET


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        (),
        3,
        {"step": 4},
        torch.zeros(0, 3),
        torch.nn.Linear(2, 2),
        print,
        torch.empty(3, device="meta"),
    ],
)
def test_objects_without_data_have_no_fingerprint(nothing: Any) -> None:
    assert of(nothing).digest == ""


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_layouts_are_passed_over() -> None:
    assert of(torch.eye(3).to_sparse()).digest == ""
    assert of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)).digest == ""


def test_variety_counts_distinct_values() -> None:
    assert of(torch.zeros(64, 64)).variety == 1
    assert of(torch.full((8,), 7)).variety == 1
    assert of(torch.arange(8)).variety == 8
    assert of(numbers(0, 64, 64)).variety > 100
    assert of(["a text", "another", "a text"]).variety == 2


def test_shape_and_plain_values_count() -> None:
    x = numbers(0, 4, 4)
    assert len({of(x).digest, of(x.view(2, 8)).digest, of(x, 1).digest, of(x, 2).digest}) == 4


def test_a_structure_that_holds_itself_ends() -> None:
    endless: list[Any] = [numbers(0, 4)]
    endless.append(endless)
    assert of(endless).digest


def test_freed_memory_is_not_read() -> None:
    x = numbers(0, 1000)
    view = x[10:]
    x.untyped_storage().resize_(0)
    assert of(view).digest == ""


@pytest.mark.parametrize("make", [range, lambda n: array("q", range(n)), slice])
def test_numbers_that_are_no_tensor_count_too(make: Any) -> None:
    x = numbers(0, 6, 8)
    assert of(x, make(5)).digest == of(x, make(5)).digest != of(x, make(6)).digest


def test_a_long_list_does_not_hide_the_next_argument() -> None:
    names = [f"{number}.png" for number in range(500)]
    first, second = (
        fingerprint_batch(BatchContents(names, [number])).fingerprint().digest for number in (1, 2)
    )
    assert first != second


def test_counts() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, -100, 6]])
    assert fingerprint_batch(BatchContents(labels), [(labels, -100), (labels, 1)]).fingerprint().counts == (
        3,
        5,
    )


@pytest.mark.parametrize(
    ("things", "rows"),
    [
        ((torch.zeros(6, 2), torch.zeros(6)), 6),
        ((torch.zeros(6, 2), torch.tensor(1.0)), 6),
        ((torch.zeros(6, 2), torch.zeros(4), torch.zeros(5)), 0),
        ((torch.tensor(1.0),), 0),
        ((), 0),
    ],
)
def test_the_size_of_a_batch(things: tuple[Any, ...], rows: int) -> None:
    assert BatchContents(things).rows() == rows


def test_the_batch_is_not_changed() -> None:
    x = numbers(0, 6, 8).requires_grad_()
    y = x * 2
    version, state = y._version, torch.get_rng_state()
    with torch.device("meta"):  # a default device of the user's is not for us
        of(y[:, ::2], y)
    assert (y._version, y.grad_fn is not None) == (version, True)
    assert torch.equal(torch.get_rng_state(), state)


def from_device(x: torch.Tensor, labels: torch.Tensor) -> Fingerprint:
    """The code path of a batch on a device, with its copy complete."""
    pieces = [_as_bytes(_downsampled(x)), _as_bytes((labels != -100).sum())]
    copy = copy_to_host(torch.cat(pieces).view(1, -1))
    return FingerprintFuture(b"", 0, [], [copy], [[pieces[0].numel()]], [], counted=1).fingerprint()


def test_each_tensor_has_its_own_digest() -> None:
    x, y, t = numbers(0, 8, 3), numbers(1, 8, 3), torch.arange(8)
    one, other = of(x, t).parts, of(y, {"times": t}).parts
    assert one[1] == other[1] != ""
    assert one[0] != other[0]
    # One value for all samples, or a mask of ones: not enough to distinguish batches.
    assert of(x, torch.tensor(3), torch.ones(8)).parts[1:] == ("", "")


def test_digests_of_tensors_arrive_from_a_device() -> None:
    x, t = numbers(0, 8, 3), torch.arange(8)
    pieces = [_as_bytes(x), _as_bytes(t)]
    copy = copy_to_host(torch.cat(pieces).view(1, -1))
    sizes = [[piece.numel() for piece in pieces]]
    assert FingerprintFuture(b"", 0, [], [copy], sizes, [], counted=0).fingerprint().parts == of(x, t).parts


def test_samples_and_counts_come_back_from_a_device() -> None:
    labels = torch.tensor([[1, -100], [2, 3]])
    x = numbers(0, 100, 3, 64, 64)
    first, again, other = (from_device(batch, labels) for batch in (x, x.clone(), x + 1))
    assert first == again
    assert first.digest != other.digest
    assert first.counts == (3,)
    assert _downsampled(x).numel() <= 4096

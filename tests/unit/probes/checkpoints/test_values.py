"""Sampled values: the same elements whatever the layout, and equality after conversions."""

from __future__ import annotations

import pytest
import torch

from ddpcheck.probes.checkpoints.values import (
    MOST_VALUES,
    are_cast,
    are_equal,
    correlation,
    is_distinctive,
    sample_values,
)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    [values] = sample_values([tensor]).result()
    assert values is not None
    return values


@pytest.mark.parametrize("shape", [(), (3,), (1000,), (40, 50), (8, 3, 5, 5), (2, 0)])
def test_few_values_of_any_shape(shape: tuple[int, ...]) -> None:
    assert values_of(torch.randn(shape)).numel() <= MOST_VALUES


def test_the_layout_does_not_matter() -> None:
    images = torch.randn(4, 3, 8, 8)
    other = images.contiguous(memory_format=torch.channels_last)
    assert are_equal(values_of(images), values_of(other))
    assert not are_equal(values_of(images), values_of(images + 1))


def test_values_are_those_of_the_call() -> None:
    tensor = torch.randn(50)
    before = tensor.clone()
    sampled = sample_values([tensor])
    tensor.zero_()
    [values] = sampled.result()
    assert values is not None
    assert are_equal(values, values_of(before))


def test_tensors_without_readable_memory_have_none() -> None:
    readable = [torch.randn(3, 3).to_sparse(), torch.empty(3, device="meta"), torch.randn(3).to(torch.cfloat)]
    assert sample_values(readable).result() == [None, None, None]


def test_conversions_are_recognised() -> None:
    stored = torch.randn(50)
    assert are_cast(values_of(stored), values_of(stored.bfloat16()))
    assert are_cast(values_of(stored), values_of(stored.half().float()))
    assert are_cast(values_of(stored.bfloat16()), values_of(stored.bfloat16().float()))
    assert not are_cast(values_of(stored), values_of(torch.randn(50).bfloat16()))
    assert not are_cast(values_of(stored), values_of(stored[:40]))


def test_nan_is_equal_to_itself() -> None:
    tensor = torch.tensor([1.0, float("nan"), 2.0])
    assert are_equal(values_of(tensor), values_of(tensor.clone()))


def test_constants_identify_nothing() -> None:
    assert not is_distinctive(values_of(torch.zeros(100)))
    assert not is_distinctive(values_of(torch.tensor(3.0)))
    assert not is_distinctive(None)
    assert is_distinctive(values_of(torch.arange(10.0)))


def test_noise_leaves_a_correlation_and_another_initialisation_none() -> None:
    torch.manual_seed(0)
    stored = torch.randn(128)
    shrunk = correlation([(stored, 0.5 * stored + 0.1 * torch.randn(128))])
    other = correlation([(stored, torch.randn(128))])
    assert shrunk is not None
    assert other is not None
    assert shrunk > 0.9
    assert abs(other) < 0.3
    assert correlation([(stored[:8], stored[:8])]) is None

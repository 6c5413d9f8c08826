"""Windows into large gradients: dense writes show, and nothing is looked at that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ddpcheck.probes import write_detection
from ddpcheck.probes.write_detection import READ_AGAIN, WINDOW, WINDOWS, sample_gradient
from tests.helpers.unreadable_tensors import UNREADABLE

COUNT = READ_AGAIN // 4 + 100


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.mul_(2),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g[0].zero_(),
        lambda g: g[-1].zero_(),
        lambda g: g[: COUNT // 10].zero_(),
        lambda g: g[COUNT // 2 - COUNT // 20 : COUNT // 2 + COUNT // 20].neg_(),
    ],
    ids=["scaled", "clamped", "first", "last", "a tenth at the beginning", "a tenth in the middle"],
)
def test_a_write_without_a_mark_shows(write: Callable[[torch.Tensor], object]) -> None:
    gradient = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    before, version = sample_gradient(gradient), gradient._version
    assert len(before) == WINDOWS * WINDOW
    assert sample_gradient(gradient) == before
    write(gradient.data)
    assert gradient._version == version
    assert sample_gradient(gradient) != before


@pytest.mark.parametrize(
    "view", [lambda g: g.view(2, -1).t(), lambda g: g[10:]], ids=["transposed", "offset"]
)
def test_whatever_is_one_span_of_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gradient = view(torch.randn(2 * COUNT))
    before = sample_gradient(gradient)
    gradient.data.mul_(2)
    assert before
    assert sample_gradient(gradient) != before


@pytest.mark.parametrize(
    "gradient",
    [None, torch.randn(READ_AGAIN // 4), torch.randn(2 * COUNT)[::2], torch.empty(COUNT, device="meta")],
    ids=["none", "small", "strided", "meta"],
)
def test_what_is_read_again(gradient: torch.Tensor | None) -> None:
    assert sample_gradient(gradient) == b""


@pytest.mark.parametrize("make", UNREADABLE)
def test_what_has_no_memory_to_look_at(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], torch.Tensor]
) -> None:
    monkeypatch.setattr(write_detection, "READ_AGAIN", -1)  # they are small
    assert sample_gradient(make()) == b""

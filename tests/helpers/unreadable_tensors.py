"""Tensors that have a size, a device and often an address, but no readable memory there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor


class Opaque(torch.Tensor):
    """A wrapper that does not expose its inner tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("no operation may be needed to see that this tensor cannot be read")


def fake() -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.ones(3))


def freed(step: int = 1) -> torch.Tensor:
    tensor = torch.ones(8)
    view = tensor[4::step]
    tensor.untyped_storage().resize_(0)
    assert view.data_ptr() != 0  # not null, but not memory either
    return view


UNREADABLE: list[Callable[[], torch.Tensor]] = [
    lambda: torch.empty(3, device="meta"),
    lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    fake,
    freed,
    lambda: freed(2),
    lambda: torch.nn.UninitializedParameter(),
    lambda: Opaque(torch.ones(3)),
    lambda: TwoTensor(freed(), freed()),
    lambda: AsyncCollectiveTensor(torch.ones(3)),
]


def wrapper() -> torch.Tensor:
    """The inner tensors can be read, but there is no memory at the wrapper's own address."""
    return TwoTensor(torch.ones(3), torch.ones(3))

"""Calls a function from inside a backward of torch, as reentrant checkpointing calls `backward`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _ignore(result: object) -> None:
    """A hook must not return another gradient."""


def inside_backward(function: Callable[[], object]) -> None:
    value = torch.ones((), requires_grad=True)
    value.register_hook(lambda gradient: _ignore(function()))
    value.backward()

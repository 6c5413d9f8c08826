"""Modes of the program are not called inside `suspend_user_modes`, and work before and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.torch_compat import suspend_user_modes


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_are_suspended_and_restored() -> None:
    ones = torch.ones(3)
    with Functions() as functions, Operators() as first, Operators() as second:
        with suspend_user_modes(), suspend_user_modes():
            assert float((ones + 1).sum()) == 6.0
        assert [mode.calls for mode in (functions, first, second)] == [0, 0, 0]
        ones + 1
        assert [mode.calls for mode in (functions, first, second)] == [1, 1, 1]


def test_modes_are_restored_after_an_exception() -> None:
    ones = torch.ones(3)
    with Functions() as functions, Operators() as operators:
        with pytest.raises(KeyboardInterrupt), suspend_user_modes():
            raise KeyboardInterrupt
        ones + 1
    assert (functions.calls, operators.calls) == (1, 1)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_default_device_is_suspended() -> None:
    with torch.device("meta"):
        with suspend_user_modes():
            assert torch.ones(1).device.type == "cpu"
        assert torch.ones(1).device.type == "meta"

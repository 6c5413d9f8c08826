"""The user's torch modes, set aside while ddpcheck looks: what it asks of a tensor is none of their business.

A mode counts, prints or refuses whatever it sees, and a default device is one too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def set_aside() -> AbstractContextManager[Any]:
    """Until the end of the block no mode of the user's, and no `__torch_function__`, hears of anything."""
    if not torch._C._len_torch_dispatch_stack():
        disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
        return disabled
    return _dispatch_modes_too()


@contextmanager
def _dispatch_modes_too() -> Iterator[None]:
    # Taken off one by one: torch's own way of doing it imports its tracer first, which takes a second.
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    with torch._C.DisableTorchFunction():
        modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            yield
        finally:
            for mode in reversed(modes):
                _push_mode(mode)

"""A data loader's iterator under watch: when it is asked for a batch, and when it gives one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Next = Callable[[Any], Any]


def timed(original: Next, asking: Next, got: Next, ran_out: Next) -> Next:
    """`__next__` of a data loader's iterator, with observers that see nothing of the batch."""

    def __next__(iterator: Any) -> Any:
        asking(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            ran_out(iterator)
            raise
        got(iterator)
        return batch

    return __next__

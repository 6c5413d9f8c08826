"""Marks what ddpcheck launches, as opposed to the job, in the log and in the counters of the simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpcheck.guard import GUARD
from tests.accelerator.device import native

OWN = 1


@contextmanager
def owned() -> Iterator[None]:
    """What this thread launches inside is ddpcheck's."""
    before = native.exchange_owner(OWN)
    try:
        yield
    finally:
        native.exchange_owner(before)


def mark_guarded_calls() -> None:
    """Every entry from the job into ddpcheck goes through the guard. Call it after the agent was installed."""
    surroundings = GUARD.surroundings

    @contextmanager
    def marked() -> Iterator[None]:
        with owned(), surroundings():
            yield

    GUARD.surroundings = marked

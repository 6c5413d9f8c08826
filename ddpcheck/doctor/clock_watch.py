"""How far the clocks of hosts are apart, measured over the store by asking for the time and timing the answer."""

from __future__ import annotations

import time

from ddpcheck.doctor.context import Clock
from ddpcheck.doctor.store_client import Board

_TIMES = 5
_SECONDS = 5.0


def ask_time(board: Board, host: str, number: int) -> Clock | None:
    """By rank 0, of the host of that number; the quickest answer counts."""
    best: Clock | None = None
    for turn in range(_TIMES):
        asked = time.time()
        board.say(f"clock/{number}/{turn}/ask", b"?")
        told = board.answer(f"clock/{number}/{turn}/told", _SECONDS)
        if told is None:
            return best
        heard = time.time()
        # The other clock was read somewhere between the two.
        seen = Clock(host, float(told) - (asked + heard) / 2, (heard - asked) / 2)
        if best is None or seen.uncertainty < best.uncertainty:
            best = seen
    return best


def tell_time(board: Board, number: int, until: float) -> None:
    """By the first rank of a host."""
    for turn in range(_TIMES):
        if board.answer(f"clock/{number}/{turn}/ask", until - time.monotonic()) is None:
            return
        board.say(f"clock/{number}/{turn}/told", repr(time.time()).encode())

"""A wakeup is an event whose methods may interrupt each other in one thread."""

from __future__ import annotations

import threading
import time

from ddpcheck.wakeup import Wakeup


def test_wait_returns_once_it_is_set() -> None:
    wakeup = Wakeup()
    woken = threading.Event()

    def wait() -> None:
        wakeup.wait()
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not wakeup.is_set()
    wakeup.set()
    assert woken.wait(60)
    assert wakeup.is_set()


def test_it_stays_set_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    for _ in range(3):
        wakeup.set()
    for _ in range(3):
        wakeup.wait()
    wakeup.clear()
    assert not wakeup.is_set()
    began = time.monotonic()
    wakeup.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_set_is_never_lost() -> None:
    wakeup, done = Wakeup(), threading.Event()
    seen, sent = 0, 0

    def consume() -> None:
        nonlocal seen
        while seen < 2000:
            wakeup.wait()
            wakeup.clear()
            seen = sent
        done.set()

    threading.Thread(target=consume, daemon=True).start()
    for number in range(1, 2001):
        sent = number
        wakeup.set()
    assert done.wait(60)

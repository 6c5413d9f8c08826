"""What a training thread provably waits for, on threads that really wait or compute."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddpcheck.probes.process.awaited import awaited

since_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no positions before Python 3.11")


class Pending(dist.Work):
    """A collective that completes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: Any = None) -> bool:
        return self.over.wait()


class Upload:
    """Something else with the same method."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def is_completed(self) -> bool:
        return self.over.is_set()


class Holder:
    def __init__(self, work: Any) -> None:
        self.work = work


def polls(work: Any) -> None:
    while not work.is_completed():
        pass


def polls_and_sleeps(work: Any) -> None:
    holder = Holder(work)
    while not holder.work.is_completed():
        time.sleep(0.001)


def polls_a_list(work: Any) -> None:
    works = [work]
    while not all(each.is_completed() for each in works):
        time.sleep(0)


def computes_meanwhile(work: Any) -> None:
    total = torch.zeros(3)
    while not work.is_completed():
        total.add_(1)


def gives_up_some_time(work: Any) -> None:
    end = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < end:
        pass


def leaves_the_loop(work: Any) -> None:
    count = 0
    while not work.is_completed():
        count += 1
        if count > 10**12:
            break


def computes_in_a_loop_after_it(work: Any) -> None:
    while not work.is_completed():
        for _ in range(10**12):
            if work.over.is_set():
                break


def computes(work: Any) -> None:
    """A pending collective, and a loop of its own."""
    while not work.over.is_set():
        torch.ones(3).sum()


def waits_for(function: Callable[[Any], None], work: Any) -> list[list[Any]]:
    """What `awaited` returns for a thread in this function, several times."""
    thread = threading.Thread(target=function, args=(work,), daemon=True)
    thread.start()
    try:
        time.sleep(0.1)
        seen = []
        for _ in range(20):
            seen.append(awaited(sys._current_frames()[thread.ident or 0]))
            time.sleep(0.003)
        return seen
    finally:
        work.over.set()
        thread.join()


@pytest.mark.parametrize("function", [polls, polls_and_sleeps, polls_a_list])
def test_a_loop_that_polls_a_collective(function: Callable[[Any], None]) -> None:
    work = Pending()
    seen = waits_for(function, work)
    # A frame of the collective's own method, which is Python only in this test, proves nothing.
    assert ["work", id(work)] in seen
    assert all(each in ([], ["work", id(work)]) for each in seen)
    assert awaited(sys._getframe()) == []


@pytest.mark.parametrize(
    "function",
    [computes_meanwhile, gives_up_some_time, leaves_the_loop, computes_in_a_loop_after_it, computes],
)
def test_a_loop_that_may_do_something_else(function: Callable[[Any], None]) -> None:
    assert waits_for(function, Pending()) == [[]] * 20


@pytest.mark.parametrize("function", [polls, polls_and_sleeps, polls_a_list])
def test_a_loop_that_polls_something_else(function: Callable[[Any], None]) -> None:
    assert waits_for(function, Upload()) == [[]] * 20


@since_311
def test_the_call_in_progress() -> None:
    class Slow(torch.Tensor):
        pass

    lock = threading.Lock()

    def item() -> Any:
        # A call in C that waits: `acquire` under the name of a call that waits for a device.
        box = type("Box", (), {"item": staticmethod(lock.acquire)})
        return box.item()

    with lock:
        thread = threading.Thread(target=item, daemon=True)
        thread.start()
        time.sleep(0.2)
        assert awaited(sys._current_frames()[thread.ident or 0]) == ["device", "item"]
    thread.join()


class Stuck(Dataset[int]):
    """Its second sample comes when the test says so."""

    def __init__(self) -> None:
        self.over = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.over.wait()
        return index


@pytest.mark.parametrize("limit", [0, 600])
def test_workers_that_owe_a_batch(limit: int) -> None:
    data = Stuck()
    iterator: Any = iter(DataLoader(data, batch_size=1, num_workers=2, timeout=limit))
    next(iterator)
    thread = threading.Thread(target=lambda: list(iterator), daemon=True)
    thread.start()
    try:
        owes = iterator._workers[1].pid
        # A loader with a time limit raises an error by itself.
        expected = [] if limit else ["loader", [owes], []]
        seen: list[Any] = [None]
        end = time.monotonic() + 30
        while time.monotonic() < end and seen != expected:
            time.sleep(0.1)
            seen = awaited(sys._current_frames()[thread.ident or 0])
        assert seen == expected
    finally:
        data.over.set()
        thread.join()

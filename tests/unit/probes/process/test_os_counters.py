"""Page faults of real memory, counted for the calling thread."""

from __future__ import annotations

import mmap
import sys
import threading

import pytest

from ddpcheck.probes.process import os_counters
from ddpcheck.probes.process.os_counters import (
    READ_EVERY_NS,
    UNKNOWN_PAGE_FAULTS,
    PageFaultCount,
    PageFaults,
    StepCounters,
)

PAGES = 512
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts by thread")


def touch_new_memory() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        # One at a time, or the system would hand out a large page.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


@linux_only
def test_new_memory_is_faulted_in_page_by_page() -> None:
    faults = PageFaults()
    assert faults.since_last() == UNKNOWN_PAGE_FAULTS
    faults.since_last()
    rest = faults.since_last()
    touch_new_memory()
    counted = faults.since_last()
    assert counted.faults >= PAGES > rest.faults >= 0
    assert counted.kernel >= 0


@linux_only
def test_page_faults_of_other_threads_do_not_count() -> None:
    faults = PageFaults()
    faults.since_last()
    other = threading.Thread(target=touch_new_memory)
    other.start()
    other.join()
    assert 0 <= faults.since_last().faults < PAGES


@linux_only
def test_another_thread_begins_anew() -> None:
    faults = PageFaults()
    faults.since_last()
    counts = []
    other = threading.Thread(target=lambda: counts.extend([faults.since_last(), faults.since_last()]))
    other.start()
    other.join()
    assert counts[0] == UNKNOWN_PAGE_FAULTS
    assert counts[1].faults >= 0
    assert faults.since_last() == UNKNOWN_PAGE_FAULTS


def test_a_system_that_does_not_count_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os_counters, "_THREAD_USAGE", None)
    faults = PageFaults()
    assert [faults.since_last(), faults.since_last()] == [UNKNOWN_PAGE_FAULTS, UNKNOWN_PAGE_FAULTS]


def test_fast_steps_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = StepCounters()
    readings = iter([(-1, -1), (8, 80), (2, 20)])
    monkeypatch.setattr(counts._queue, "since_last", lambda: 400)
    monkeypatch.setattr(counts._faults, "since_last", lambda: PageFaultCount(*next(readings)))
    begin = READ_EVERY_NS
    # The first reading has nothing to compare with. The next one covers four steps, the last one a single slow step.
    assert counts.of_step(begin)[1:] == (-1, -1)
    quick = [counts.of_step(begin + READ_EVERY_NS * part // 4) for part in (1, 2, 3, 4)]
    assert quick[-1] == (100, 2, 20)
    assert [each[1:] for each in quick[:3]] == [(-1, -1)] * 3
    assert counts.of_step(begin + 2 * READ_EVERY_NS) == (400, 2, 20)

"""Activity counters of processes from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from ddpcheck.launcher.process.process_table import Activity, descendants, read_activity


def me(own: tuple[int, ...] = ()) -> Activity:
    return read_activity(os.getpid(), threading.get_native_id(), own, descendants(os.getpid()))


def test_processor_time_of_thread_and_process() -> None:
    before = me()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        sum(range(1000))
    after = me()
    assert after.thread_ticks - before.thread_ticks >= 10
    assert after.ticks - before.ticks >= 10


def test_sleeps_count_as_context_switches() -> None:
    before = me()
    for _ in range(20):
        time.sleep(0.001)
    after = me()
    assert after.thread_switches - before.thread_switches >= 20
    assert after.switches - before.switches >= 20


def test_written_bytes() -> None:
    before = me()
    with open(os.devnull, "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
    assert me().bytes - before.bytes >= 1 << 20


def test_timer_sleep_of_threads_except_our_own() -> None:
    ids: list[int] = []
    ended = threading.Event()

    def sleep() -> None:
        ids.append(threading.get_native_id())
        while not ended.is_set():
            time.sleep(0.5)

    assert not me().by_clock
    thread = threading.Thread(target=sleep)
    thread.start()
    deadline = time.monotonic() + 60
    while not (by_clock := me().by_clock) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert by_clock
    assert not me(own=tuple(ids)).by_clock
    ended.set()
    thread.join()


def test_processor_time_includes_reaped_children() -> None:
    before = me()
    busy = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", busy], check=True)
    assert me().ticks - before.ticks >= 15


def test_an_ended_process_has_no_activity() -> None:
    pid = 2**22 + 1
    assert read_activity(pid, 0, (), ()) == Activity(pid=pid)

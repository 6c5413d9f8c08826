"""Process ids of ranks in another namespace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.launcher.process.namespaces import RankProcessIds
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.machine_identity import pid_namespace
from tests.helpers.run_builder import RunBuilder

# Process 1 of a namespace of its own, with a second thread: prints its namespace, start and thread ids as it sees them.
INSIDE = """
import os, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
started = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
threads = sorted(each.native_id for each in threading.enumerate())
print(os.readlink("/proc/self/ns/pid"), os.getpid(), started, *threads, flush=True)
time.sleep(600)
"""


@pytest.mark.needs("lab")
def test_processes_and_threads_in_another_namespace_are_found(tmp_path: Path) -> None:
    header = RunBuilder(tmp_path, 1).records[0][0]
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", INSIDE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outside:
        try:
            assert outside.stdout is not None
            namespace, pid, started, *threads = outside.stdout.readline().split()
            rank = replace(header, pid=int(pid), ticks=int(started), pid_namespace=namespace)
            ids = RankProcessIds()
            found = ids.pid(rank)
            assert found is not None
            assert (int(pid), found != 1, process_start(found)) == (1, True, int(started))
            by_thread = ids.threads(rank, {int(each) for each in threads})
            assert set(by_thread) == {int(each) for each in threads}
            assert all(os.path.exists(f"/proc/{found}/task/{each}") for each in by_thread.values())
            # Another process with the same id in that namespace, at another time.
            assert RankProcessIds().pid(replace(rank, ticks=int(started) + 1)) is None
        finally:
            outside.kill()
    deadline = time.monotonic() + 60
    while process_start(found) == int(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert RankProcessIds().pid(rank) is None


def test_ids_of_the_own_namespace_are_not_looked_for(tmp_path: Path) -> None:
    header = RunBuilder(tmp_path, 1).records[0][0]
    for namespace in ("", pid_namespace()):
        own = replace(header, pid=12345678, pid_namespace=namespace)
        assert RankProcessIds().pid(own) == 12345678
        assert RankProcessIds().threads(own, {7}) == {7: 7}

"""The thread in the launcher that samples its node and writes what it sees to the node's log."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ddpcheck.launcher.node_log import NodeLog
from ddpcheck.sampling import cpu, interface_facts
from ddpcheck.sampling.connections import Connections
from ddpcheck.sampling.infiniband import InfinibandPorts
from ddpcheck.sampling.interfaces import Interfaces
from ddpcheck.sampling.merging import merged
from ddpcheck.sampling.nvml import Gpus
from ddpcheck.sampling.processes import RankProcesses, network_namespace

# The share of one core that sampling may take: a sample that costs more is followed by a longer pause.
MOST_OF_A_CORE = 0.01
# After so many lines, two samples make one line, then four, …: the log of a long job stays small.
LINES_BEFORE_THINNING = 1200
# What is left of a disk belongs to the ranks' records, and to the launcher's notes of how they ended.
LEAST_ROOM = 4 << 20
# A driver that hangs must not keep the launcher from ending.
_PATIENCE_SECONDS = 2.0


class Sampler:
    """Samples between `start` and `close`. What fails here is written down, and the job goes on unsampled."""

    def __init__(self, run_dir: Path, hz: float, lines: int = LINES_BEFORE_THINNING) -> None:
        self._run_dir = run_dir
        self._hz = hz
        self._lines = lines
        self._ranks = RankProcesses()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Once the command runs: nothing is to be forked off a process with threads."""
        if self._thread is None and self._hz > 0:
            # A daemon: the launcher ends whether or not the thread does.
            self._thread = threading.Thread(target=self._run, name="ddpcheck-sampler", daemon=True)
            self._thread.start()

    def meet(self, rank: int, pid: int) -> None:
        """A rank of this node has reported."""
        self._ranks.add(rank, pid)

    def close(self) -> None:
        """Take a last sample and end."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        # A log of its own, on the same file: the launcher's belongs to its main thread.
        log = NodeLog(self._run_dir)
        try:
            _Sampling(log, self._hz, self._lines, self._ranks, self._over).run()
        except Exception as error:
            log.write("fault", probe="sampler", entry="sample", error=f"{type(error).__name__}: {error}")
        finally:
            log.close()


class _Sampling:
    """What lives on the thread."""

    def __init__(
        self, log: NodeLog, hz: float, lines: int, ranks: RankProcesses, over: threading.Event
    ) -> None:
        self._log = log
        self._hz = hz
        self._lines = lines
        self._ranks = ranks
        self._over = over
        self._pid = os.getpid()  # launchers of one host share a log
        self._cpu = cpu.Cpu()
        self._interfaces = Interfaces()
        self._infiniband = InfinibandPorts()
        self._connections = Connections()
        self._gpus = Gpus()
        self._kept: dict[str, Any] | None = None  # read, but not written yet
        self._unwritten = 0
        self._written = 0
        self._each = 1  # samples that make a line

    def run(self) -> None:
        began = time.monotonic()
        self._gpus.open()
        first = self._sample()
        self._write("hardware", **self._describe())
        self._keep(first)
        samples, spent, mark = 1, 0.0, time.thread_time()  # opening NVML is paid once
        while not self._over.wait(self._pause(spent)):
            self._keep(self._sample())
            samples += 1
            # From one sample to the next, so that waking up counts as well.
            spent, mark = time.thread_time() - mark, time.thread_time()
        self._keep(self._sample())
        self._flush()
        self._gpus.close()
        self._write(
            "sampled",
            samples=samples + 1,
            seconds=round(time.monotonic() - began, 3),
            cpu_seconds=round(time.thread_time(), 4),
        )

    def _write(self, kind: str, **fields: Any) -> None:
        if _room(self._log.path.parent) >= LEAST_ROOM:
            self._log.write(kind, pid=self._pid, **fields)

    def _pause(self, spent: float) -> float:
        return max(1.0 / self._hz, min(spent, 1.0) / MOST_OF_A_CORE)

    def _describe(self) -> dict[str, Any]:
        return {
            "hz": self._hz,
            "namespace": network_namespace(),
            **cpu.describe(),
            "interfaces": interface_facts.describe(),
            "infiniband": self._infiniband.describe(),
            "nvml": self._gpus.describe(),
        }

    def _sample(self) -> dict[str, Any]:
        # The time of the interfaces' counters: what follows may take longer.
        sample: dict[str, Any] = {"time": round(time.time(), 4), "interfaces": self._interfaces.read()}
        sample["cpu"] = self._cpu.read()
        sample["memory"] = cpu.memory_used()
        sample["ranks"] = self._ranks.read()
        sometimes = {
            "infiniband": self._infiniband.read(),
            "connections": self._connections.read([row[0] for row in sample["ranks"].values()]),
            "gpus": self._gpus.read(),
        }
        sample.update((name, found) for name, found in sometimes.items() if found)
        return sample

    def _keep(self, sample: dict[str, Any]) -> None:
        self._kept = sample if self._kept is None else merged(self._kept, sample)
        self._unwritten += 1
        if self._unwritten >= self._each:
            self._flush()

    def _flush(self) -> None:
        if self._kept is None:
            return
        self._write("sample", **self._kept)
        self._kept = None
        self._unwritten = 0
        self._written += 1
        if self._written >= self._lines:
            self._each *= 2
            self._written = 0


def _room(folder: Path) -> int:
    """Bytes that are left where the run is written."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize

"""The thread in the launcher that samples its node and writes what it sees to the node's log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddpcheck.records.node_log import NodeLog
from ddpcheck.sampling.host import RankProcesses
from ddpcheck.sampling.sources import Sources

# Of several values the highest tells most; of clocks the lowest, and of throttling all reasons together.
_LOWEST = {"clock", "memory_clock"}
_HIGHEST = {"cpu", "memory", "busy", "memory_busy", "temperature", "power"}
_ALL = {"throttled"}


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The later sample, whose totals hold the earlier ones already, with what was notable in the earlier."""
    # What the later one does not tell, as while a driver is silent, stays as it was.
    return {**earlier, **_worst(earlier, later)}


def _worst(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(later)
    if "connections" in earlier:
        result.setdefault("connections", earlier["connections"])  # they are not in every sample
    for name, value in later.items():
        before = earlier.get(name)
        if before is None:
            continue
        if name in _LOWEST:
            result[name] = min(before, value)
        elif name in _HIGHEST:
            result[name] = max(before, value)
        elif name in _ALL:
            result[name] = before | value
        elif name == "gpus":
            result[name] = [_worst(*pair) for pair in zip(before, value, strict=False)]
        elif name == "ranks":
            result[name] = {rank: _larger(before.get(rank), row) for rank, row in value.items()}
    return result


def _larger(before: list[int] | None, row: list[int]) -> list[int]:
    """A rank's memory at its most; the process id and what it read and wrote as they are now."""
    if before is None or before[0] != row[0]:
        return row
    return [row[0], max(before[1], row[1]), *row[2:]]


# The share of one core that samples may take: one that costs more is followed by a longer pause. With what it takes
# to begin, a driver's library above all, sampling stays below 1 % of a core over a minute or more.
MOST_OF_A_CORE = 0.008
# After so many lines, two samples make one line, then four, …: the log of a long job stays small.
LINES_BEFORE_THINNING = 1200
# What is left of a disk belongs to the ranks' records, and to the launcher's notes of how they ended.
LEAST_ROOM = 4 << 20
# A driver that hangs must not keep the launcher from ending.
_PATIENCE_SECONDS = 2.0


class Sampler:
    """Samples between `start` and `close`. What fails here is written down, and the job goes on."""

    def __init__(self, run_dir: Path, hz: float, lines: int = LINES_BEFORE_THINNING) -> None:
        self._hz = hz
        self._lines = lines
        self._ranks = RankProcesses()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = NodeLog(
            run_dir
        )  # of its own, on the same file: the launcher's belongs to its main thread

    @property
    def unwritten(self) -> int:
        """Lines for which there was no room, or that could not be written."""
        return self._log.lost

    def start(self) -> None:
        """Once the command runs: nothing is to be forked off a process with threads."""
        if self._thread is None and self._hz > 0:
            # A daemon: the launcher ends whether or not the thread does.
            self._thread = threading.Thread(target=self._run, name="ddpcheck-sampler", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no room for one more thread; the job's ranks come first
                self._thread, self._hz = None, 0.0
                _fault(self._log, "thread", f"{type(error).__name__}: {error}")

    def meet(self, rank: int, pid: int) -> None:
        """A rank of this node has reported."""
        self._ranks.add(rank, pid)

    def close(self) -> None:
        """Take a last sample and end."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            _Sampling(self._log, self._hz, self._lines, self._ranks, self._over).run()
        except Exception as error:
            _fault(self._log, "sample", f"{type(error).__name__}: {error}")
        finally:
            self._log.close()


class _Sampling:
    """What lives on the thread."""

    def __init__(
        self, log: NodeLog, hz: float, lines: int, ranks: RankProcesses, over: threading.Event
    ) -> None:
        self._log = log
        self._hz = hz
        self._lines = lines
        self._over = over
        self._pid = os.getpid()  # launchers of one host share a log
        self._sources = Sources(ranks, partial(_fault, log))
        self._kept: dict[str, Any] | None = None  # read, but not written yet
        self._unwritten = 0
        self._written = 0
        self._each = 1  # samples that make a line

    def run(self) -> None:
        began = time.monotonic()
        first = self._sources.read()
        self._describe()
        self._keep(first)
        samples, spent, mark = 1, 0.0, self._cpu_seconds()  # opening NVML is paid once
        while not self._over.wait(self._pause(spent)):
            self._keep(self._sources.read())
            samples += 1
            # From one sample to the next, so that waking up counts as well.
            spent, mark = self._cpu_seconds() - mark, self._cpu_seconds()
            if self._sources.news:  # a driver that took its time
                self._describe()
                spent, mark = 0.0, self._cpu_seconds()
        self._keep(self._sources.read())
        self._flush()
        self._sources.close()
        seconds, effort = round(time.monotonic() - began, 3), round(self._cpu_seconds(), 4)
        self._write("sampled", samples=samples + 1, seconds=seconds, cpu_seconds=effort)

    def _cpu_seconds(self) -> float:
        return time.thread_time() + self._sources.cpu_seconds

    def _describe(self) -> None:
        self._write("hardware", hz=self._hz, **self._sources.describe())

    def _write(self, kind: str, **fields: Any) -> None:
        if _room(self._log.path.parent) >= LEAST_ROOM:
            self._log.write(kind, pid=self._pid, **fields)
        else:
            self._log.lost += 1

    def _pause(self, spent: float) -> float:
        return max(1.0 / self._hz, min(spent, 1.0) / MOST_OF_A_CORE)

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


def _fault(log: NodeLog, source: str, error: str) -> None:
    log.write("fault", probe="sampler", entry=source, host=log.host, error=error)


def _room(folder: Path) -> int:
    """Bytes that are left where the run is written."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize

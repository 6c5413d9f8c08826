"""The launcher thread that samples all sources of the node and writes the samples to the node log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddpcheck.records.node_log import NodeLog
from ddpcheck.sampling import host
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling.host import RankProcesses, network_namespace
from ddpcheck.sampling.interfaces import InfinibandPorts, Interfaces
from ddpcheck.sampling.nvml import GpuSource
from ddpcheck.sampling.tcp import Connections

Value = TypeVar("Value")
# Written even if empty or 0. Other sources are omitted if empty, for example without InfiniBand or GPUs.
_ALWAYS = {"interfaces", "ranks", "cpu", "memory"}


class Sources:
    """All sources of samples. A source that raises is reported to `fault(name, error)` and not read again."""

    def __init__(self, ranks: RankProcesses, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._failed: set[str] = set()
        self._ranks = ranks
        # The processes of ranks at the last reading: connections are filtered by them.
        self._pids: list[int] = []
        processors = self._try("cpu", host.Cpu)
        interfaces = self._try("interfaces", Interfaces)
        infiniband = self._try("infiniband", InfinibandPorts)
        connections = self._try("connections", Connections)
        self._gpus = self._try("gpus", GpuSource)
        # The interfaces come first: the time of a sample is that of their counters, and the others take longer.
        self._readers: dict[str, Callable[[], Any]] = {"memory": host.memory_used, "ranks": self._read_ranks}
        self._describers: dict[str, Callable[[], Any]] = {"interfaces": interface_facts.describe}
        if interfaces is not None:
            self._readers = {"interfaces": interfaces.read, **self._readers}
        if processors is not None:
            self._readers["cpu"] = processors.read
        if infiniband is not None:
            self._readers["infiniband"] = infiniband.read
            self._describers["infiniband"] = infiniband.describe
        if connections is not None:
            self._readers["connections"] = lambda: connections.read(self._pids)
        if self._gpus is not None:
            self._readers["gpus"] = self._gpus.read

    @property
    def cpu_seconds(self) -> float:
        """Processor time of threads other than the reading thread."""
        return 0.0 if self._gpus is None else self._gpus.cpu_seconds

    @property
    def has_new_facts(self) -> bool:
        """Whether `describe` returns more than at its last call."""
        return self._gpus is not None and self._gpus.has_new_facts

    def read(self) -> dict[str, Any]:
        """One sample of all sources that can be read."""
        sample: dict[str, Any] = {"time": round(time.time(), 4)}
        for name, read in self._readers.items():
            value = self._try(name, read)
            if value is not None and (value or name in _ALWAYS):
                sample[name] = value
        return sample

    def describe(self) -> dict[str, Any]:
        """Properties that do not change during the run."""
        facts: dict[str, Any] = {"namespace": network_namespace(), **host.describe()}
        for name, describe in self._describers.items():
            facts[name] = self._try(f"{name} described", describe) or []
        if self._gpus is not None:
            self._gpus.has_new_facts = False
            facts["nvml"] = self._gpus.facts
        return facts

    def close(self) -> None:
        if self._gpus is None:
            return
        silent = self._gpus.silent_seconds
        if silent:
            self._fault("gpus", f"NVML has not answered for {silent:.0f} s")
        self._try("gpus", self._gpus.close)

    def _read_ranks(self) -> dict[str, list[int]]:
        ranks = self._ranks.read()
        self._pids = [row[0] for row in ranks.values()]
        return ranks

    def _try(self, name: str, call: Callable[[], Value]) -> Value | None:
        if name in self._failed:
            return None
        try:
            return call()
        except Exception as error:
            self._failed.add(name)
            self._fault(name, f"{type(error).__name__}: {error}")
            return None


# Maximum share of one core for sampling: the pause after an expensive sample is longer. Including the start, mainly
# the driver's library, sampling takes less than 1 % of a core over a minute or more.
MAX_CPU_SHARE = 0.008
# After this many lines, two samples are merged into one line, then four, …, so that the log of a long job stays small.
LINES_BEFORE_DOWNSAMPLING = 1200
# If less is free, no samples are written: the space is reserved for records and for the end of the ranks.
MIN_FREE_BYTES = 4 << 20
# A driver that hangs must not keep the launcher from exiting.
_CLOSE_SECONDS = 2.0
# How to merge several samples into one: clocks by their minimum, most others by their maximum, throttling reasons by
# their union.
_MERGED_BY_MIN = {"clock", "memory_clock"}
_MERGED_BY_MAX = {"cpu", "memory", "busy", "memory_busy", "temperature", "power"}
_MERGED_BY_UNION = {"throttled"}


class Sampler:
    """Samples between `start` and `close`. Errors are logged and do not affect the job."""

    def __init__(self, run_dir: Path, hz: float, lines: int = LINES_BEFORE_DOWNSAMPLING) -> None:
        self._hz = hz
        self._lines = lines
        self._ranks = RankProcesses()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # A second log object on the same file: the launcher's is used by its main thread.
        self._log = NodeLog(run_dir)

    @property
    def unwritten(self) -> int:
        """Lines that were not written, because of an error or a full disk."""
        return self._log.lost

    def start(self) -> None:
        """Call after the command was started: a process with threads should not fork."""
        if self._thread is None and self._hz > 0:
            # A daemon thread does not keep the launcher from exiting.
            self._thread = threading.Thread(target=self._run, name="ddpcheck-sampler", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the thread limit is reached
                self._thread, self._hz = None, 0.0
                _fault(self._log, "thread", f"{type(error).__name__}: {error}")

    def add_rank(self, rank: int, pid: int) -> None:
        """Sample the process of this rank too."""
        self._ranks.add(rank, pid)

    def close(self) -> None:
        """Take a last sample and stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            _Sampling(self._log, self._hz, self._lines, self._ranks, self._stop).run()
        except Exception as error:
            _fault(self._log, "sample", f"{type(error).__name__}: {error}")
        finally:
            self._log.close()


class _Sampling:
    """The loop of the sampling thread."""

    def __init__(
        self, log: NodeLog, hz: float, lines: int, ranks: RankProcesses, stop: threading.Event
    ) -> None:
        self._log = log
        self._hz = hz
        self._lines = lines
        self._stop = stop
        self._pid = os.getpid()  # launchers on one host share a log
        self._sources = Sources(ranks, partial(_fault, log))
        self._pending: dict[str, Any] | None = None  # read but not yet written
        self._pending_count = 0
        self._written = 0
        self._samples_per_line = 1

    def run(self) -> None:
        began = time.monotonic()
        first = self._sources.read()
        self._describe()
        self._add(first)
        samples, spent, mark = 1, 0.0, self._cpu_seconds()  # without the start of NVML
        while not self._stop.wait(self._pause(spent)):
            self._add(self._sources.read())
            samples += 1
            # Measured from sample to sample, including the wake-up.
            spent, mark = self._cpu_seconds() - mark, self._cpu_seconds()
            if self._sources.has_new_facts:  # the driver has answered late
                self._describe()
                spent, mark = 0.0, self._cpu_seconds()
        self._add(self._sources.read())
        self._flush()
        self._sources.close()
        seconds, cpu_seconds = round(time.monotonic() - began, 3), round(self._cpu_seconds(), 4)
        self._write("sampled", samples=samples + 1, seconds=seconds, cpu_seconds=cpu_seconds)

    def _cpu_seconds(self) -> float:
        return time.thread_time() + self._sources.cpu_seconds

    def _describe(self) -> None:
        self._write("hardware", hz=self._hz, **self._sources.describe())

    def _write(self, kind: str, **fields: Any) -> None:
        if _free_bytes(self._log.path.parent) >= MIN_FREE_BYTES:
            self._log.write(kind, pid=self._pid, **fields)
        else:
            self._log.lost += 1

    def _pause(self, spent: float) -> float:
        return max(1.0 / self._hz, min(spent, 1.0) / MAX_CPU_SHARE)

    def _add(self, sample: dict[str, Any]) -> None:
        self._pending = sample if self._pending is None else merge_samples(self._pending, sample)
        self._pending_count += 1
        if self._pending_count >= self._samples_per_line:
            self._flush()

    def _flush(self) -> None:
        if self._pending is None:
            return
        self._write("sample", **self._pending)
        self._pending = None
        self._pending_count = 0
        self._written += 1
        if self._written >= self._lines:
            self._samples_per_line *= 2
            self._written = 0


def merge_samples(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """One sample for both: totals of the later one, extremes of both."""
    # Values that are missing in the later sample, for example because the driver did not answer, are kept.
    return {**earlier, **_merge_values(earlier, later)}


def _merge_values(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(later)
    if "connections" in earlier:
        result.setdefault("connections", earlier["connections"])  # not part of every sample
    for name, value in later.items():
        before = earlier.get(name)
        if before is None:
            continue
        if name in _MERGED_BY_MIN:
            result[name] = min(before, value)
        elif name in _MERGED_BY_MAX:
            result[name] = max(before, value)
        elif name in _MERGED_BY_UNION:
            result[name] = before | value
        elif name == "gpus":
            result[name] = [_merge_values(*pair) for pair in zip(before, value, strict=False)]
        elif name == "ranks":
            result[name] = {rank: _merge_rank(before.get(rank), row) for rank, row in value.items()}
    return result


def _merge_rank(before: list[int] | None, row: list[int]) -> list[int]:
    """The peak memory of a rank; process id and storage counters of the later sample."""
    if before is None or before[0] != row[0]:
        return row
    return [row[0], max(before[1], row[1]), *row[2:]]


def _fault(log: NodeLog, source: str, error: str) -> None:
    log.write("fault", probe="sampler", entry=source, host=log.host, error=error)


def _free_bytes(folder: Path) -> int:
    """Free bytes on the disk of the run folder."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize

"""All sources that are sampled on a node. A source that fails does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ddpcheck.sampling import host
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling.gpu_source import GpuSource
from ddpcheck.sampling.host import RankProcesses, network_namespace
from ddpcheck.sampling.interfaces import InfinibandPorts, Interfaces
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

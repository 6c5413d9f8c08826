"""Everything that is sampled on a node, each source by itself: one that fails is left and keeps no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ddpcheck.sampling import host
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling.gpu_source import GpuSource
from ddpcheck.sampling.host import RankProcesses, network_namespace
from ddpcheck.sampling.infiniband import InfinibandPorts
from ddpcheck.sampling.interfaces import Interfaces
from ddpcheck.sampling.tcp import Connections

Made = TypeVar("Made")
# Told even where it is nothing or 0; a node without InfiniBand, GPUs or neighbours has no more to say of them.
_ALWAYS = {"interfaces", "ranks", "cpu", "memory"}


class Sources:
    """`fault` is told the name of a source and what went wrong, once for each."""

    def __init__(self, ranks: RankProcesses, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._left: set[str] = set()
        self._ranks = ranks
        # The ranks' processes as they were last seen: whose connections to look at.
        self._pids: list[int] = []
        processors = self._try("cpu", host.Cpu)
        interfaces = self._try("interfaces", Interfaces)
        infiniband = self._try("infiniband", InfinibandPorts)
        connections = self._try("connections", Connections)
        self._gpus = self._try("gpus", GpuSource)
        # In this order: the time of a sample is that of the interfaces' counters, and what follows takes longer.
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
        """Processor time spent on other threads than the one that reads."""
        return 0.0 if self._gpus is None else self._gpus.cpu_seconds

    @property
    def news(self) -> bool:
        """Whether there is more to describe than there was."""
        return self._gpus is not None and self._gpus.news

    def read(self) -> dict[str, Any]:
        """One sample, of what can be read."""
        sample: dict[str, Any] = {"time": round(time.time(), 4)}
        for name, read in self._readers.items():
            found = self._try(name, read)
            if found is not None and (found or name in _ALWAYS):
                sample[name] = found
        return sample

    def describe(self) -> dict[str, Any]:
        """What stays as it is."""
        facts: dict[str, Any] = {"namespace": network_namespace(), **host.describe()}
        for name, describe in self._describers.items():
            facts[name] = self._try(f"{name} described", describe) or []
        if self._gpus is not None:
            self._gpus.news = False
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
        found = self._ranks.read()
        self._pids = [row[0] for row in found.values()]
        return found

    def _try(self, name: str, call: Callable[[], Made]) -> Made | None:
        if name in self._left:
            return None
        try:
            return call()
        except Exception as error:
            self._left.add(name)
            self._fault(name, f"{type(error).__name__}: {error}")
            return None

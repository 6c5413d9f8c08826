"""One GPU: what it is, and what it does at a moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddpcheck.sampling.counters import BITS, CounterTotals

# The answers by which a device says that it will never tell; by their numbers, which are NVML's ABI.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 2, 3, 4, 13
_NEVER = {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND}
_LOST = {15, 16, 28}  # GPU is lost, reset required, GPU not found
# An answer such as "timeout" may be better the next time, but not for ever.
_PATIENCE = 3


class Calls:
    """All calls go through here, so that none raises and none is repeated in vain."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self.handle = handle
        self.lost = ""
        self.unsupported: set[str] = set()
        self._error: type[Exception] = nvml.NVMLError
        self._failed: Counter[str] = Counter()

    def ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the device answers, or None. `name` is what the answer is about."""
        if self.lost or name in self.unsupported:
            return None
        try:
            answer = call(self.handle, *arguments)
        except self._error as error:
            self.refused(name, getattr(error, "value", 0), str(error))
            return None
        self._failed.pop(name, None)
        return answer

    def refused(self, name: str, code: int, told: str) -> None:
        if code in _LOST:
            self.lost = told
            return
        self._failed[name] += 1
        if code in _NEVER or self._failed[name] >= _PATIENCE:
            self.unsupported.add(name)


_SUCCESS = 0
_UNSIGNED_INT = 1
_SENT, _RECEIVED = 0, 1  # counters of nvmlDeviceGetPcieThroughput
_KILO = 1000
_NVLINK_BYTES, _PCIE_BYTES = "NVLink bytes", "PCIe bytes"


@dataclass(frozen=True)
class _Pair:
    """Two fields, what was sent and what was received, and the bytes that one unit of them stands for."""

    sent: int
    received: int
    unit: int


# From NVLink 5 on in bytes; before that the data alone, without protocol, in KiB.
_NVLINK = (_Pair(202, 204, 1), _Pair(138, 139, 1024))
_PCIE = _Pair(197, 198, 1)


class LinkBytes:
    """Bytes by NVLink and direction since the first reading."""

    def __init__(self, nvml: ModuleType, calls: Calls, links: list[int]) -> None:
        self._nvml = nvml
        self._calls = calls
        self._links = links
        self._totals = CounterTotals()
        self._pair: _Pair | None = None
        for pair in _NVLINK if links else ():
            answer = self._ask(pair)
            if answer is not None and all(value.nvmlReturn == _SUCCESS for value in answer):
                self._pair = pair
                return
        if links:
            calls.unsupported.add(_NVLINK_BYTES)

    def read(self) -> list[list[int]] | None:
        """Sent by each link, and received; None where the device does not count."""
        if self._pair is None:
            return None
        answer = self._ask(self._pair)
        if answer is None:
            return None
        totals = [self._pair.unit * self._total(place, value) for place, value in enumerate(answer)]
        return [totals[: len(self._links)], totals[len(self._links) :]]

    def _total(self, place: int, value: Any) -> int:
        """A link that is down answers for itself alone, and stays where it was."""
        if value.nvmlReturn != _SUCCESS:
            return self._totals.total(place)
        return self._totals.add(place, number_in(value), width_of(value))

    def _ask(self, pair: _Pair) -> Any:
        # A bare field would be that of link 0.
        fields = [(pair.sent, link) for link in self._links] + [(pair.received, link) for link in self._links]
        return self._calls.ask(_NVLINK_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)


class PcieBytes:
    """Bytes over PCIe since the first reading, or else the rate of the last 20 ms."""

    def __init__(self, nvml: ModuleType, calls: Calls) -> None:
        self._nvml = nvml
        self._calls = calls
        self._totals = CounterTotals()
        self._counts = True

    def read(self) -> list[int] | None:
        """Sent and received; None where the device does not count."""
        if not self._counts:
            return None
        fields = [_PCIE.sent, _PCIE.received]
        answer = self._calls.ask(_PCIE_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)
        for value in answer or ():
            if value.nvmlReturn != _SUCCESS:
                self._calls.refused(_PCIE_BYTES, value.nvmlReturn, "PCIe bytes are not told")
                answer = None
                break
        if answer is None:
            self._counts = _PCIE_BYTES not in self._calls.unsupported
            return None
        return [
            self._totals.add(place, number_in(value), width_of(value)) for place, value in enumerate(answer)
        ]

    def read_rate(self) -> list[int] | None:
        """Bytes a second. Only where nothing is counted: the device measures for 20 ms while we wait."""
        if self._counts:
            return None
        rates = []
        for which in (_SENT, _RECEIVED):
            rate = self._calls.ask("PCIe throughput", self._nvml.nvmlDeviceGetPcieThroughput, which)
            if rate is None:
                return None
            rates.append(rate * _KILO)
        return rates


def number_in(value: Any) -> int:
    return int(value.value.uiVal if value.valueType == _UNSIGNED_INT else value.value.ullVal)


def width_of(value: Any) -> int:
    """In bits, at which the counter begins again."""
    return 32 if value.valueType == _UNSIGNED_INT else BITS


_SM, _MEMORY = 1, 2  # clocks
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0  # memory errors
_MIG_ON = 1
_GPU_SENSOR = 0


class Device:
    """A GPU by its index. Totals count from the first reading."""

    def __init__(self, nvml: ModuleType, index: int) -> None:
        self.index = index
        self.calls = Calls(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        self._nvml = nvml
        self._totals = CounterTotals()
        self.links = self._active_links()
        self._nvlink = LinkBytes(nvml, self.calls, self.links)
        self._pcie = PcieBytes(nvml, self.calls)
        self._slices = self._mig_slices()

    def describe(self) -> dict[str, Any]:
        nvml, ask = self._nvml, self.calls.ask
        memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        return {
            "index": self.index,
            "name": ask("name", nvml.nvmlDeviceGetName) or "",
            "uuid": ask("uuid", nvml.nvmlDeviceGetUUID) or "",
            "bus": self.bus(),
            "memory": memory.total if memory else None,
            "clock": ask("highest clock", nvml.nvmlDeviceGetMaxClockInfo, _SM),
            "pcie": [
                ask("PCIe generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
                ask("PCIe width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            ],
            "nvlinks": self.links,
            "mig": [_memory_of(self._nvml, calls) for calls in self._slices],
            "unsupported": sorted(self.calls.unsupported),
        }

    def bus(self) -> str:
        return bus_id(self.calls.ask("bus", self._nvml.nvmlDeviceGetPciInfo))

    def read(self) -> dict[str, Any]:
        """Only what the device tells; a device that is lost tells that, and nothing any more."""
        if self.calls.lost:
            return {"lost": self.calls.lost}
        nvml, ask = self._nvml, self.calls.ask
        memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        used = ask("utilisation", nvml.nvmlDeviceGetUtilizationRates)
        found = {
            "memory": memory.used if memory else None,
            "busy": used.gpu if used else None,
            "memory_busy": used.memory if used else None,
            "clock": ask("clock", nvml.nvmlDeviceGetClockInfo, _SM),
            "memory_clock": ask("memory clock", nvml.nvmlDeviceGetClockInfo, _MEMORY),
            "throttled": self._throttled(),
            "temperature": ask("temperature", nvml.nvmlDeviceGetTemperature, _GPU_SENSOR),
            "power": ask("power", nvml.nvmlDeviceGetPowerUsage),
            "ecc": self._ecc(),
            "nvlink": self._nvlink.read(),
            "pcie": self._pcie.read(),
            "pcie_rate": self._pcie.read_rate(),
            "pcie_link": self._pcie_link(),
            "processes": self._processes(),
            "mig": [_used_of(nvml, calls) for calls in self._slices] or None,
        }
        told = {name: value for name, value in found.items() if value is not None}
        return {**told, "lost": self.calls.lost} if self.calls.lost else told

    def _throttled(self) -> int | None:
        """A bit for each reason, under the name that drivers had before 535 as well."""
        nvml = self._nvml
        reasons = self.calls.ask("throttle reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if reasons is None:
            reasons = self.calls.ask("throttling", nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if reasons is None else int(reasons)

    def _ecc(self) -> list[int] | None:
        """Corrected and uncorrected memory errors."""
        counts = []
        for which in (_CORRECTED, _UNCORRECTED):
            count = self.calls.ask("ECC", self._nvml.nvmlDeviceGetTotalEccErrors, which, _SINCE_BOOT)
            if count is None:
                return None
            counts.append(self._totals.add(("ecc", which), count))
        return counts

    def _pcie_link(self) -> list[int] | None:
        """Generation and width now: both sink when the link is idle."""
        generation = self.calls.ask("PCIe generation now", self._nvml.nvmlDeviceGetCurrPcieLinkGeneration)
        width = self.calls.ask("PCIe width now", self._nvml.nvmlDeviceGetCurrPcieLinkWidth)
        return None if generation is None or width is None else [generation, width]

    def _processes(self) -> dict[str, int | None] | None:
        running = self.calls.ask("processes", self._nvml.nvmlDeviceGetComputeRunningProcesses)
        return None if running is None else {str(each.pid): each.usedGpuMemory for each in running}

    def _active_links(self) -> list[int]:
        links = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            state = self.calls.ask("NVLink", self._nvml.nvmlDeviceGetNvLinkState, link)
            if state is None:
                break
            if state:
                links.append(link)
        if links:
            # The refusal came from beyond the last link.
            self.calls.unsupported.discard("NVLink")
        return links

    def _mig_slices(self) -> list[Calls]:
        nvml = self._nvml
        mode = self.calls.ask("MIG", nvml.nvmlDeviceGetMigMode)
        if not mode or mode[0] != _MIG_ON:
            return []
        found = []
        for place in range(self.calls.ask("MIG slices", nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            try:
                found.append(Calls(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.calls.handle, place)))
            except nvml.NVMLError:  # an empty place; the next one may be taken
                continue
        return found


def _memory_of(nvml: ModuleType, calls: Calls) -> dict[str, Any]:
    memory = calls.ask("memory", nvml.nvmlDeviceGetMemoryInfo)
    uuid = calls.ask("uuid", nvml.nvmlDeviceGetUUID)
    return {"uuid": uuid or "", "memory": memory.total if memory else None}


def _used_of(nvml: ModuleType, calls: Calls) -> int | None:
    memory = calls.ask("memory", nvml.nvmlDeviceGetMemoryInfo)
    return memory.used if memory else None


def bus_id(pci: Any) -> str:
    if pci is None:
        return ""
    return pci.busId.decode(errors="replace") if isinstance(pci.busId, bytes) else str(pci.busId)

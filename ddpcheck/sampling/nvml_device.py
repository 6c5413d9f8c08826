"""One GPU: its properties and its readings, through NVML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddpcheck.sampling.interfaces import BITS, CounterTotals

# NVML error codes (part of its ABI) after which a call is not repeated.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 2, 3, 4, 13
_PERMANENT = {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND}
_LOST = {15, 16, 28}  # GPU is lost, reset required, GPU not found
# Other errors, such as a timeout, are retried until a call has failed this often in a row.
_MAX_FAILURES = 3
_SUCCESS = 0
_UNSIGNED_INT = 1
_SENT, _RECEIVED = 0, 1  # counters of nvmlDeviceGetPcieThroughput
_KILO = 1000
_NVLINK_BYTES, _PCIE_BYTES = "NVLink bytes", "PCIe bytes"
_SM, _MEMORY = 1, 2  # clocks
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0  # memory errors
_MIG_ON = 1
_GPU_SENSOR = 0


class Calls:
    """Calls NVML functions of one device. Calls do not raise, and unsupported ones are not repeated."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self.handle = handle
        self.lost = ""
        self.unsupported: set[str] = set()
        self._error: type[Exception] = nvml.NVMLError
        self._failed: Counter[str] = Counter()

    def ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the call, or None if it fails. `name` is the quantity that the call reads."""
        if self.lost or name in self.unsupported:
            return None
        try:
            answer = call(self.handle, *arguments)
        except self._error as error:
            self.record_failure(name, getattr(error, "value", 0), str(error))
            return None
        self._failed.pop(name, None)
        return answer

    def record_failure(self, name: str, code: int, message: str) -> None:
        if code in _LOST:
            self.lost = message
            return
        self._failed[name] += 1
        if code in _PERMANENT or self._failed[name] >= _MAX_FAILURES:
            self.unsupported.add(name)


@dataclass(frozen=True)
class _ByteFields:
    """NVML fields for sent and received data, and the bytes per unit of these fields."""

    sent: int
    received: int
    unit: int


# Since NVLink 5 in bytes; before that in KiB, without protocol overhead.
_NVLINK = (_ByteFields(202, 204, 1), _ByteFields(138, 139, 1024))
_PCIE = _ByteFields(197, 198, 1)


class LinkBytes:
    """Bytes by NVLink and direction since the first reading."""

    def __init__(self, nvml: ModuleType, calls: Calls, links: list[int]) -> None:
        self._nvml = nvml
        self._calls = calls
        self._links = links
        self._totals = CounterTotals()
        self._fields: _ByteFields | None = None
        for byte_fields in _NVLINK if links else ():
            answer = self._read_fields(byte_fields)
            if answer is not None and all(value.nvmlReturn == _SUCCESS for value in answer):
                self._fields = byte_fields
                return
        if links:
            calls.unsupported.add(_NVLINK_BYTES)

    def read(self) -> list[list[int]] | None:
        """Bytes sent and bytes received by each link; None if the device has no counters."""
        if self._fields is None:
            return None
        answer = self._read_fields(self._fields)
        if answer is None:
            return None
        totals = [self._fields.unit * self._total(index, value) for index, value in enumerate(answer)]
        return [totals[: len(self._links)], totals[len(self._links) :]]

    def _total(self, index: int, value: Any) -> int:
        """The total of one counter. That of a link which is down does not change."""
        if value.nvmlReturn != _SUCCESS:
            return self._totals.total(index)
        return self._totals.add(index, number_in(value), width_of(value))

    def _read_fields(self, byte_fields: _ByteFields) -> Any:
        # Without a link number, a field is that of link 0.
        fields = [(byte_fields.sent, link) for link in self._links] + [
            (byte_fields.received, link) for link in self._links
        ]
        return self._calls.ask(_NVLINK_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)


class PcieBytes:
    """Bytes over PCIe since the first reading, or the rate over 20 ms if there are no counters."""

    def __init__(self, nvml: ModuleType, calls: Calls) -> None:
        self._nvml = nvml
        self._calls = calls
        self._totals = CounterTotals()
        self._has_counters = True

    def read(self) -> list[int] | None:
        """Bytes sent and received; None if the device has no counters."""
        if not self._has_counters:
            return None
        fields = [_PCIE.sent, _PCIE.received]
        answer = self._calls.ask(_PCIE_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)
        for value in answer or ():
            if value.nvmlReturn != _SUCCESS:
                self._calls.record_failure(
                    _PCIE_BYTES, value.nvmlReturn, "PCIe byte counters are not available"
                )
                answer = None
                break
        if answer is None:
            self._has_counters = _PCIE_BYTES not in self._calls.unsupported
            return None
        return [
            self._totals.add(index, number_in(value), width_of(value)) for index, value in enumerate(answer)
        ]

    def read_rate(self) -> list[int] | None:
        """Bytes per second; only without counters, since the call blocks for 20 ms."""
        if self._has_counters:
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
    """Width of the counter in bits."""
    return 32 if value.valueType == _UNSIGNED_INT else BITS


class Device:
    """A GPU by its index. Totals start at the first reading."""

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
            "mig": [_describe_slice(self._nvml, calls) for calls in self._slices],
            "unsupported": sorted(self.calls.unsupported),
        }

    def bus(self) -> str:
        return bus_id(self.calls.ask("bus", self._nvml.nvmlDeviceGetPciInfo))

    def read(self) -> dict[str, Any]:
        """The available readings. For a lost device, only the error."""
        if self.calls.lost:
            return {"lost": self.calls.lost}
        nvml, ask = self._nvml, self.calls.ask
        memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        used = ask("utilisation", nvml.nvmlDeviceGetUtilizationRates)
        readings = {
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
            "mig": [_slice_memory_used(nvml, calls) for calls in self._slices] or None,
        }
        available = {name: value for name, value in readings.items() if value is not None}
        return {**available, "lost": self.calls.lost} if self.calls.lost else available

    def _throttled(self) -> int | None:
        """A bit mask of reasons. Drivers before 535 have another function name for it."""
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
        """Current generation and width. Both decrease while the link is idle."""
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
            # The failure came from the number after the last link.
            self.calls.unsupported.discard("NVLink")
        return links

    def _mig_slices(self) -> list[Calls]:
        nvml = self._nvml
        mode = self.calls.ask("MIG", nvml.nvmlDeviceGetMigMode)
        if not mode or mode[0] != _MIG_ON:
            return []
        slices = []
        for index in range(self.calls.ask("MIG slices", nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            try:
                slices.append(Calls(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.calls.handle, index)))
            except nvml.NVMLError:  # an unused index; the next one may be used
                continue
        return slices


def _describe_slice(nvml: ModuleType, calls: Calls) -> dict[str, Any]:
    memory = calls.ask("memory", nvml.nvmlDeviceGetMemoryInfo)
    uuid = calls.ask("uuid", nvml.nvmlDeviceGetUUID)
    return {"uuid": uuid or "", "memory": memory.total if memory else None}


def _slice_memory_used(nvml: ModuleType, calls: Calls) -> int | None:
    memory = calls.ask("memory", nvml.nvmlDeviceGetMemoryInfo)
    return memory.used if memory else None


def bus_id(pci: Any) -> str:
    if pci is None:
        return ""
    return pci.busId.decode(errors="replace") if isinstance(pci.busId, bytes) else str(pci.busId)

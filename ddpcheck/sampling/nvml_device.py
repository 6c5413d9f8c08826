"""One GPU: what it is, and what it does at a moment."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ddpcheck.sampling.counters import Totals
from ddpcheck.sampling.nvml_calls import Calls
from ddpcheck.sampling.nvml_fields import LinkBytes, PcieBytes

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
        self._totals = Totals()
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

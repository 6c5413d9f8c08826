"""All AMD GPUs of the node, through the `amdsmi` package of ROCm, which is used where it is installed.

The facts and readings have the same names and units as those of NVML. Calls that the library of this machine does not
have, or that it answers with "N/A", are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpcheck.sampling.interfaces import CounterTotals

# Exists where the kernel driver of AMD GPUs is loaded.
DRIVER_FILE = Path("/dev/kfd")
NOT_INSTALLED = (
    "AMD GPUs: install amdsmi to sample them (ROCm has it in /opt/rocm/share/amd_smi; it must be importable by the "
    "Python of ddpcheck)"
)
# Failures in a row after which a call is not repeated.
_MAX_FAILURES = 3
_XGMI = 2
_MILLIWATTS = 1000
# PCIe generation by transfer rate in GT/s; newer libraries give MT/s.
_GENERATIONS = {2: 1, 2.5: 1, 5: 2, 8: 3, 16: 4, 32: 5, 64: 6}


def is_present() -> bool:
    """Whether this node has AMD's driver, or the package."""
    return DRIVER_FILE.exists() or importlib.util.find_spec("amdsmi") is not None


class AmdGpus:
    """The counterpart of `nvml.Gpus`."""

    def __init__(self) -> None:
        self.note = ""
        self._smi: ModuleType | None = None
        self._devices: list[AmdDevice] = []

    @property
    def has_gpus(self) -> bool:
        return bool(self._devices)

    def open(self) -> None:
        """Initialize the library and find the GPUs. Call `read` from the same thread."""
        try:
            import amdsmi
        except ImportError:
            self.note = NOT_INSTALLED
            return
        except Exception as error:  # the package loads its library and raises what that leads to
            self.note = f"amdsmi cannot be loaded: {type(error).__name__}: {error}"
            return
        try:
            amdsmi.amdsmi_init()
            self._smi = amdsmi
            handles = amdsmi.amdsmi_get_processor_handles()
            self._devices = [AmdDevice(amdsmi, index, handle) for index, handle in enumerate(handles)]
        except amdsmi.AmdSmiException as error:
            self.note = f"amdsmi does not answer: {error}"
            self._devices = []

    def describe(self) -> dict[str, Any]:
        if self._smi is None or not self._devices:
            return {"note": self.note or "no GPU"}
        return {
            "note": self.note,
            "driver": self._devices[0].driver(),
            "gpus": [device.describe() for device in self._devices],
            "topology": [[_connection(one, other) for other in self._devices] for one in self._devices],
            "p2p": [[one is other or one.reads(other) for other in self._devices] for one in self._devices],
        }

    def read(self) -> list[dict[str, Any]]:
        return [device.read() for device in self._devices]

    def close(self) -> None:
        if self._smi is not None:
            try:
                self._smi.amdsmi_shut_down()
            except self._smi.AmdSmiException:
                self.note = "amdsmi could not be closed"
            self._smi = None


class AmdDevice:
    """One GPU by its handle. Calls do not raise; those that fail repeatedly are not repeated."""

    def __init__(self, smi: ModuleType, index: int, handle: Any) -> None:
        self.index = index
        self.handle = handle
        self.unsupported: set[str] = set()
        self._smi = smi
        self._failed: dict[str, int] = {}
        self._totals = CounterTotals()

    def ask(self, name: str, function: str, *arguments: Any) -> Any:
        """The result of a function of the library, or None. `name` is the quantity that it reads."""
        call: Callable[..., Any] | None = getattr(self._smi, function, None)
        if name in self.unsupported:
            return None
        if call is None:
            self.unsupported.add(name)
            return None
        try:
            answer = call(self.handle, *arguments)
        except self._smi.AmdSmiException:
            self._failed[name] = self._failed.get(name, 0) + 1
            if self._failed[name] >= _MAX_FAILURES:
                self.unsupported.add(name)
            return None
        self._failed.pop(name, None)
        return answer

    def _member(self, enum: str, *names: str) -> Any:
        """The first of these members that the library has; ROCm has renamed some of them."""
        members = getattr(self._smi, enum, None)
        return next((getattr(members, name) for name in names if hasattr(members, name)), None)

    def driver(self) -> str:
        version = (self.ask("driver", "amdsmi_get_gpu_driver_info") or {}).get("driver_version", "")
        return f"amdgpu {version}".strip()

    def describe(self) -> dict[str, Any]:
        static = (self.ask("PCIe", "amdsmi_get_pcie_info") or {}).get("pcie_static") or {}
        clock = self.ask("clock", "amdsmi_get_clock_info", self._member("AmdSmiClkType", "GFX", "SYS")) or {}
        return {
            "index": self.index,
            "name": str((self.ask("name", "amdsmi_get_gpu_asic_info") or {}).get("market_name", "")),
            "uuid": str(self.ask("uuid", "amdsmi_get_gpu_device_uuid") or ""),
            "bus": str(self.ask("bus", "amdsmi_get_gpu_device_bdf") or ""),
            "memory": self._vram("amdsmi_get_gpu_memory_total"),
            "clock": _number(clock.get("max_clk")),
            "pcie": [_generation(static.get("max_pcie_speed")), _number(static.get("max_pcie_width"))],
            "nvlinks": [],
            "mig": [],
            "unsupported": sorted(self.unsupported),
        }

    def read(self) -> dict[str, Any]:
        activity = self.ask("utilisation", "amdsmi_get_gpu_activity") or {}
        readings = {
            "memory": self._vram("amdsmi_get_gpu_memory_usage"),
            "busy": _number(activity.get("gfx_activity")),
            "memory_busy": _number(activity.get("umc_activity")),
            "clock": self._clock("GFX", "SYS"),
            "memory_clock": self._clock("MEM"),
            "temperature": self._temperature(),
            "power": self._power(),
            "ecc": self._ecc(),
            "pcie_link": self._pcie_link(),
            "processes": self._processes(),
        }
        return {name: value for name, value in readings.items() if value is not None}

    def reads(self, other: AmdDevice) -> bool:
        """Whether this GPU can read the memory of another one."""
        return bool(self.ask("P2P", "amdsmi_is_P2P_accessible", other.handle))

    def link_type(self, other: AmdDevice) -> int | None:
        answer = self.ask("topology", "amdsmi_topo_get_link_type", other.handle) or {}
        return _number(answer.get("type"))

    def _vram(self, function: str) -> int | None:
        """In bytes."""
        return _number(self.ask(function, function, self._member("AmdSmiMemoryType", "VRAM")))

    def _clock(self, *names: str) -> int | None:
        """In MHz."""
        kind = self._member("AmdSmiClkType", *names)
        answer = self.ask(f"clock {names[0]}", "amdsmi_get_clock_info", kind) or {}
        return _number(answer.get("clk", answer.get("cur_clk")))

    def _temperature(self) -> int | None:
        sensor = self._member("AmdSmiTemperatureType", "HOTSPOT", "JUNCTION", "EDGE")
        current = self._member("AmdSmiTemperatureMetric", "CURRENT")
        return _number(self.ask("temperature", "amdsmi_get_temp_metric", sensor, current))

    def _power(self) -> int | None:
        """In milliwatts, as NVML gives it."""
        answer = self.ask("power", "amdsmi_get_power_info") or {}
        names = ("socket_power", "current_socket_power", "average_socket_power")
        watts = next((value for name in names if (value := _number(answer.get(name))) is not None), None)
        return None if watts is None else watts * _MILLIWATTS

    def _ecc(self) -> list[int] | None:
        answer = self.ask("ECC", "amdsmi_get_gpu_total_ecc_count") or {}
        counts = [_number(answer.get(name)) for name in ("correctable_count", "uncorrectable_count")]
        if None in counts:
            return None
        return [self._totals.add(("ecc", index), count or 0) for index, count in enumerate(counts)]

    def _pcie_link(self) -> list[int] | None:
        """Current generation and width."""
        metric = (self.ask("PCIe", "amdsmi_get_pcie_info") or {}).get("pcie_metric") or {}
        generation, width = _generation(metric.get("pcie_speed")), _number(metric.get("pcie_width"))
        return None if generation is None or width is None else [generation, width]

    def _processes(self) -> dict[str, int | None] | None:
        running = self.ask("processes", "amdsmi_get_gpu_process_list")
        if running is None:
            return None
        return {
            str(each["pid"]): _number((each.get("memory_usage") or {}).get("vram_mem", each.get("mem")))
            for each in running
            if isinstance(each, dict) and "pid" in each
        }


def _connection(one: AmdDevice, other: AmdDevice) -> str:
    if one is other:
        return "X"
    link_type = one.link_type(other)
    return "?" if link_type is None else "XGMI" if link_type == _XGMI else "PCIe"


def _number(value: Any) -> int | None:
    """None for "N/A" and what else is no number."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _generation(speed: Any) -> int | None:
    if not isinstance(speed, int | float) or speed <= 0:
        return None
    return _GENERATIONS.get(speed / 1000 if speed > 1000 else speed)

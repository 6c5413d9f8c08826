"""`amdsmi` without a GPU: names, signatures, units and "N/A" values of AMD SMI's Python API (ROCm 6.4).

The variable DDPCHECK_TEST_AMDSMI holds JSON: `devices`, and by function `fail` (error codes) and `without` (names that
this version of the library does not have).
"""

from __future__ import annotations

import enum
import json
import os
from typing import Any

_SCRIPT: dict[str, Any] = json.loads(os.environ.get("DDPCHECK_TEST_AMDSMI", "{}"))
_initialized = False


class AmdSmiException(Exception):
    """Base class of all exceptions of the library."""


class AmdSmiLibraryException(AmdSmiException):
    """An error of the C library."""

    def __init__(self, err_code: int) -> None:
        super().__init__(f"Error code:\n\t{err_code} | AMDSMI_STATUS_NOT_SUPPORTED")
        self.err_code = err_code


class AmdSmiParameterException(AmdSmiException):
    """A parameter of the wrong type."""


class AmdSmiMemoryType(enum.IntEnum):
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiClkType(enum.IntEnum):
    SYS = 0
    GFX = 0
    DF = 1
    MEM = 4


class AmdSmiTemperatureType(enum.IntEnum):
    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2


class AmdSmiTemperatureMetric(enum.IntEnum):
    CURRENT = 0
    MAX = 1


class _Handle:
    """Stands for a pointer to a processor."""

    def __init__(self, index: int) -> None:
        self.index = index


def _called(name: str, handle: Any = None) -> None:
    if not _initialized:
        raise AmdSmiLibraryException(32)  # not initialized
    if handle is not None and not isinstance(handle, _Handle):
        raise AmdSmiParameterException(f"Invalid parameter: {handle!r}")
    if name in _SCRIPT.get("fail", {}):
        raise AmdSmiLibraryException(_SCRIPT["fail"][name])


def amdsmi_init(flag: int = 2) -> None:
    global _initialized
    if "amdsmi_init" in _SCRIPT.get("fail", {}):
        raise AmdSmiLibraryException(_SCRIPT["fail"]["amdsmi_init"])
    _initialized = True


def amdsmi_shut_down() -> None:
    _called("amdsmi_shut_down")


def amdsmi_get_processor_handles() -> list[_Handle]:
    _called("amdsmi_get_processor_handles")
    return [_Handle(index) for index in range(_SCRIPT.get("devices", 2))]


def amdsmi_get_gpu_asic_info(processor_handle: Any) -> dict[str, Any]:
    _called("amdsmi_get_gpu_asic_info", processor_handle)
    return {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "asic_serial": "0x1", "oam_id": 0}


def amdsmi_get_gpu_driver_info(processor_handle: Any) -> dict[str, Any]:
    _called("amdsmi_get_gpu_driver_info", processor_handle)
    return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "2015/01/01 00:00"}


def amdsmi_get_gpu_device_uuid(processor_handle: Any) -> str:
    _called("amdsmi_get_gpu_device_uuid", processor_handle)
    return f"{processor_handle.index:02x}ff74a1-0000-1000-80f0-11e5d5a3e8d1"


def amdsmi_get_gpu_device_bdf(processor_handle: Any) -> str:
    _called("amdsmi_get_gpu_device_bdf", processor_handle)
    return f"0000:{0xC + 0x10 * processor_handle.index:02x}:00.0"


def amdsmi_get_gpu_memory_total(processor_handle: Any, mem_type: AmdSmiMemoryType) -> int:
    _called("amdsmi_get_gpu_memory_total", processor_handle)
    return {AmdSmiMemoryType.VRAM: 192 << 30}.get(mem_type, 1 << 30)


def amdsmi_get_gpu_memory_usage(processor_handle: Any, mem_type: AmdSmiMemoryType) -> int:
    _called("amdsmi_get_gpu_memory_usage", processor_handle)
    return {AmdSmiMemoryType.VRAM: 20 << 30}.get(mem_type, 1 << 20)


def amdsmi_get_gpu_activity(processor_handle: Any) -> dict[str, Any]:
    _called("amdsmi_get_gpu_activity", processor_handle)
    return {"gfx_activity": 70 + processor_handle.index, "umc_activity": 12, "mm_activity": "N/A"}


def amdsmi_get_clock_info(processor_handle: Any, clock_type: AmdSmiClkType) -> dict[str, Any]:
    _called("amdsmi_get_clock_info", processor_handle)
    clock = {AmdSmiClkType.GFX: (1900, 2100), AmdSmiClkType.MEM: (1200, 1300)}[clock_type]
    return {"clk": clock[0], "min_clk": 132, "max_clk": clock[1], "clk_locked": 0, "clk_deep_sleep": "N/A"}


def amdsmi_get_temp_metric(
    processor_handle: Any, sensor_type: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
) -> int:
    _called("amdsmi_get_temp_metric", processor_handle)
    if sensor_type is AmdSmiTemperatureType.EDGE:
        raise AmdSmiLibraryException(2)  # MI300 has no edge sensor
    return 58


def amdsmi_get_power_info(processor_handle: Any) -> dict[str, Any]:
    _called("amdsmi_get_power_info", processor_handle)
    return {
        "socket_power": 512,
        "current_socket_power": 512,
        "average_socket_power": "N/A",
        "gfx_voltage": "N/A",
        "power_limit": 750000000,
    }


def amdsmi_get_gpu_total_ecc_count(processor_handle: Any) -> dict[str, int]:
    _called("amdsmi_get_gpu_total_ecc_count", processor_handle)
    return {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}


def amdsmi_get_pcie_info(processor_handle: Any) -> dict[str, Any]:
    _called("amdsmi_get_pcie_info", processor_handle)
    return {
        "pcie_static": {
            "max_pcie_width": 16,
            "max_pcie_speed": 32000,
            "pcie_interface_version": 5,
            "slot_type": "OAM",
        },
        "pcie_metric": {"pcie_width": 8, "pcie_speed": 16000, "pcie_bandwidth": 40, "pcie_replay_count": 0},
    }


def amdsmi_get_gpu_process_list(processor_handle: Any) -> list[dict[str, Any]]:
    _called("amdsmi_get_gpu_process_list", processor_handle)
    usage = {"gtt_mem": 2, "cpu_mem": 3, "vram_mem": 18 << 30}
    return [{"name": "python", "pid": 4000 + processor_handle.index, "mem": 18 << 30, "memory_usage": usage}]


def amdsmi_is_P2P_accessible(processor_handle_src: Any, processor_handle_dst: Any) -> bool:
    _called("amdsmi_is_P2P_accessible", processor_handle_src)
    return True


def amdsmi_topo_get_link_type(processor_handle_src: Any, processor_handle_dst: Any) -> dict[str, int]:
    _called("amdsmi_topo_get_link_type", processor_handle_src)
    return {"hops": 1, "type": 2}


for _name in _SCRIPT.get("without", ()):
    del globals()[_name]

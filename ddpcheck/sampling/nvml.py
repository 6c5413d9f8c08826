"""The GPUs of the node, through NVML; a node without a driver says so once and has none."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from ddpcheck.sampling.nvml_device import Device
from ddpcheck.sampling.nvml_topology import topology

_LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = "no NVIDIA driver on this node"


class Gpus:
    """All GPUs that NVML shows, MIG slices under their GPU."""

    def __init__(self) -> None:
        self.note = ""
        self._nvml: ModuleType | None = None
        self._devices: list[Device] = []
        self._driver = ""

    def open(self) -> None:
        """Meet the GPUs. Reading them comes from the same thread: NVML is left alone by all others."""
        try:
            # Where there is no driver, the import of pynvml, a tenth of a second, is spared.
            ctypes.CDLL(_LIBRARY)
        except OSError:
            self.note = NO_DRIVER
            return
        try:
            import pynvml
        except ImportError:
            self.note = "nvidia-ml-py is not installed: GPUs are not sampled"
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = self._meet(pynvml)
        except pynvml.NVMLError as error:
            self.note = f"NVML does not answer: {error}"
            self._devices = []

    def _meet(self, nvml: ModuleType) -> list[Device]:
        self._driver = str(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                devices.append(Device(nvml, index))
            except nvml.NVMLError as error:  # one that is broken does not hide the others
                self.note = f"GPU {index} cannot be reached: {error}"
        return devices

    def describe(self) -> dict[str, Any]:
        """What stays as it is; after the first reading, as only then is known what is not supported."""
        if self._nvml is None or not self._devices:
            return {"note": self.note or "no GPU"}
        return {
            "note": self.note,
            "driver": self._driver,
            "gpus": [device.describe() for device in self._devices],
            **topology(self._nvml, self._devices),
        }

    def read(self) -> list[dict[str, Any]]:
        return [device.read() for device in self._devices]

    def close(self) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                self.note = "NVML could not be closed"
            self._nvml = None

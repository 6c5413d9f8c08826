"""All GPUs of the node and their topology, through NVML."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from ddpcheck.sampling.nvml_device import Device, bus_id

# The names that nvidia-smi uses for the nearest common ancestor of two GPUs.
_ANCESTORS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# As numbers: pynvml defines the first constant as a tuple by mistake.
_READ, _NVLINK = 0, 2
_P2P_OK = 0
_SWITCH = 2
_LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = "no NVIDIA driver on this node"


class Gpus:
    """All GPUs that NVML reports, with MIG slices as part of their GPU."""

    def __init__(self) -> None:
        self.note = ""
        self._nvml: ModuleType | None = None
        self._devices: list[Device] = []
        self._driver = ""

    def open(self) -> None:
        """Initialize NVML and find the GPUs. Call `read` from the same thread."""
        try:
            # Without a driver, skip the import of pynvml, which takes 0.1 s.
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
            self._devices = self._find_devices(pynvml)
        except pynvml.NVMLError as error:
            self.note = f"NVML does not answer: {error}"
            self._devices = []

    def _find_devices(self, nvml: ModuleType) -> list[Device]:
        self._driver = str(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                devices.append(Device(nvml, index))
            except nvml.NVMLError as error:  # the other GPUs are still sampled
                self.note = f"GPU {index} cannot be reached: {error}"
        return devices

    def describe(self) -> dict[str, Any]:
        """Properties that do not change. Call after the first reading, which finds out what is not supported."""
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


def topology(nvml: ModuleType, devices: list[Device]) -> dict[str, Any]:
    """Two matrices: the connection of each pair of GPUs, and whether each can read the memory of the other."""
    peers = [_peers(nvml, device) for device in devices]
    buses = [device.bus() for device in devices]
    return {
        "topology": [
            [_connection(nvml, devices, peers, buses, one, other) for other in range(len(devices))]
            for one in range(len(devices))
        ],
        "p2p": [[one is other or _p2p(nvml, one, other, _READ) for other in devices] for one in devices],
    }


def _connection(
    nvml: ModuleType, devices: list[Device], peers: list[list[str]], buses: list[str], one: int, other: int
) -> str:
    if one == other:
        return "X"
    links = peers[one].count(buses[other]) if buses[other] else 0
    if not links and _p2p(nvml, devices[one], devices[other], _NVLINK):
        # Through a switch, every link leads to all GPUs of the switch.
        links = min(peers[one].count("switch"), peers[other].count("switch"))
    if links:
        return f"NV{links}"
    level = devices[one].calls.ask(
        "topology", nvml.nvmlDeviceGetTopologyCommonAncestor, devices[other].calls.handle
    )
    return _ANCESTORS.get(level, "?")


def _peers(nvml: ModuleType, device: Device) -> list[str]:
    """The other end of each active link: the bus id of a GPU, or "switch"."""
    peers = []
    for link in device.links:
        kind = device.calls.ask("NVLink peers", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        remote = device.calls.ask("NVLink remote", nvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
        peers.append("switch" if kind == _SWITCH else bus_id(remote))
    return peers


def _p2p(nvml: ModuleType, one: Device, other: Device, what: int) -> bool:
    status = one.calls.ask("P2P", nvml.nvmlDeviceGetP2PStatus, other.calls.handle, what)
    return status is not None and status == _P2P_OK

"""How the GPUs of a node are connected: by NVLink, or by the PCIe tree at one height or another."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ddpcheck.sampling.nvml_device import Device, bus_id

# What nvidia-smi calls the nearest common ancestor of two GPUs.
_ANCESTORS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# As numbers: pynvml's name for the first of them is a tuple by mistake.
_READ, _NVLINK = 0, 2
_P2P_OK = 0
_SWITCH = 2


def topology(nvml: ModuleType, devices: list[Device]) -> dict[str, Any]:
    """Two matrices: the connection of each pair of GPUs, and whether they can read each other's memory."""
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
        # Through a switch every link leads to every GPU behind it.
        links = min(peers[one].count("switch"), peers[other].count("switch"))
    if links:
        return f"NV{links}"
    level = devices[one].calls.ask(
        "topology", nvml.nvmlDeviceGetTopologyCommonAncestor, devices[other].calls.handle
    )
    return _ANCESTORS.get(level, "?")


def _peers(nvml: ModuleType, device: Device) -> list[str]:
    """Where each active link leads: the bus of a GPU, or a switch."""
    found = []
    for link in device.links:
        kind = device.calls.ask("NVLink peers", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        remote = device.calls.ask("NVLink remote", nvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
        found.append("switch" if kind == _SWITCH else bus_id(remote))
    return found


def _p2p(nvml: ModuleType, one: Device, other: Device, what: int) -> bool:
    status = one.calls.ask("P2P", nvml.nvmlDeviceGetP2PStatus, other.calls.handle, what)
    return status is not None and status == _P2P_OK

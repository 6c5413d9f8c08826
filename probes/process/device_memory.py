"""Memory on a device by the statistics of torch, which are kept on the host: reading them waits for nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ddpcheck.device_api import DeviceMemory as DeviceMemory


def is_initialized() -> bool:
    """Whether this process uses a device; if not, reading must not create a context on it."""
    cuda: Any = torch.cuda
    return "torch.cuda" in sys.modules and bool(cuda.is_initialized())


def device_memory(device: int | None = None) -> DeviceMemory:
    """Of the current device by default. The nested form is faster: torch does not sort 100 names."""
    if not is_initialized():
        return DeviceMemory()
    cuda: Any = torch.cuda
    return from_statistics(cuda.memory_stats_as_nested_dict(device))


def from_statistics(raw: Mapping[str, Any]) -> DeviceMemory:
    allocated = raw.get("allocated_bytes", {}).get("all", {})
    reserved = raw.get("reserved_bytes", {}).get("all", {})
    return DeviceMemory(allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0))


def memory_on_other_devices(own: torch.device) -> dict[str, int]:
    """What this process holds on devices that are not its own, as after a load without `map_location`."""
    if not is_initialized():
        return {}
    others = [index for index in range(torch.cuda.device_count()) if index != own.index]
    allocated = {f"{own.type}:{index}": device_memory(index).allocated for index in others}
    return {name: size for name, size in allocated.items() if size}

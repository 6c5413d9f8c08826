"""Memory on a device by torch's own statistics: kept on the host, so that asking waits for nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Bytes that torch's allocator holds on one device."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0


def awake() -> bool:
    """Whether this process uses a device; one that does not must not get a context from us."""
    cuda: Any = torch.cuda
    return "torch.cuda" in sys.modules and bool(cuda.is_initialized())


def device_memory(device: int | None = None) -> DeviceMemory:
    """Of the current device, where none is given. The nested form spares torch the sorting of 100 names."""
    if not awake():
        return DeviceMemory()
    cuda: Any = torch.cuda
    return from_statistics(cuda.memory_stats_as_nested_dict(device))


def from_statistics(raw: Mapping[str, Any]) -> DeviceMemory:
    allocated = raw.get("allocated_bytes", {}).get("all", {})
    reserved = raw.get("reserved_bytes", {}).get("all", {})
    return DeviceMemory(allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0))


def held_elsewhere(own: torch.device) -> dict[str, int]:
    """What this process holds on devices that are not its own, as a load without `map_location` leaves it."""
    if not awake():
        return {}
    others = [number for number in range(torch.cuda.device_count()) if number != own.index]
    held = {f"{own.type}:{number}": device_memory(number).allocated for number in others}
    return {name: size for name, size in held.items() if size}

"""Copies results from a device to the host on a side stream, without waiting for the user's work."""

from __future__ import annotations

from typing import Any, Protocol

import torch

_STREAM_INTERFACE = ("Stream", "Event", "current_stream", "stream")

_side_streams: dict[torch.device, Any] = {}


class HostCopy(Protocol):
    """Results that are being copied to the host."""

    def ready(self) -> bool: ...

    def rows(self) -> list[list[int]]: ...


class DirectCopy:
    """Results that are on the CPU already, or on a device without streams, where reading them waits."""

    __slots__ = ("_lanes",)

    def __init__(self, lanes: torch.Tensor) -> None:
        self._lanes = lanes

    def ready(self) -> bool:
        return True

    def rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._lanes.tolist()
        return rows


class StreamCopy:
    """Results copied to pinned memory on a side stream, followed by an event.

    The hash runs in order on the user's stream and reads the values of that moment; only the copy uses the side stream.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, lanes: torch.Tensor, streams: Any, *, pin_memory: bool = True) -> None:
        side = _side_streams.get(lanes.device)
        if side is None:
            side = _side_streams[lanes.device] = streams.Stream(lanes.device)
        side.wait_stream(streams.current_stream(lanes.device))
        self._host = torch.empty(lanes.shape, dtype=lanes.dtype, device="cpu", pin_memory=pin_memory)
        with streams.stream(side):
            self._host.copy_(lanes, non_blocking=True)
            self._event = streams.Event()
            self._event.record(side)
        # The allocator must not reuse the memory on the user's stream before the copy has read it.
        lanes.record_stream(side)

    def ready(self) -> bool:
        return bool(self._event.query())

    def rows(self) -> list[list[int]]:
        self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows


def copy_to_host(lanes: torch.Tensor) -> HostCopy:
    """Start the copy to the host."""
    streams = getattr(torch, lanes.device.type, None)
    if lanes.is_cpu or not all(hasattr(streams, name) for name in _STREAM_INTERFACE):
        return DirectCopy(lanes)
    return StreamCopy(lanes, streams)

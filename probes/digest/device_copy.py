"""The lanes' way from a device to the host, beside the user's work and without waiting for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

_STREAM_INTERFACE = ("Stream", "Event", "current_stream", "stream")

_side_streams: dict[torch.device, Any] = {}


class Copy(Protocol):
    """Lanes on their way."""

    def ready(self) -> bool: ...

    def rows(self) -> list[list[int]]: ...


class DirectCopy:
    """Lanes on the CPU already, or on a device without streams, where reading them is the one way to wait."""

    __slots__ = ("_lanes",)

    def __init__(self, lanes: torch.Tensor) -> None:
        self._lanes = lanes

    def ready(self) -> bool:
        return True

    def rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._lanes.tolist()
        return rows


class StreamCopy:
    """Lanes copied to pinned memory on a side stream, with an event behind them.

    The hash ran in order on the user's stream and saw the values of its moment; only the copy steps aside.
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
        # The allocator must not hand the lanes to the user's stream before the copy has read them.
        lanes.record_stream(side)

    def ready(self) -> bool:
        return bool(self._event.query())

    def rows(self) -> list[list[int]]:
        self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows


def copy_to_host(lanes: torch.Tensor) -> Copy:
    """Start the way to the host."""
    streams = getattr(torch, lanes.device.type, None)
    if lanes.is_cpu or not all(hasattr(streams, name) for name in _STREAM_INTERFACE):
        return DirectCopy(lanes)
    return StreamCopy(lanes, streams)

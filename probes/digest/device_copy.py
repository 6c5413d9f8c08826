"""Copies results from a device to the host on a side stream, without waiting for the user's work."""

from __future__ import annotations

from typing import Protocol

import torch

from ddpcheck.device_api import DeviceApi, api_of


class HostCopy(Protocol):
    """Results that are being copied to the host."""

    def ready(self) -> bool: ...

    def tensor(self) -> torch.Tensor:
        """The results on the CPU; waits for the device if necessary."""

    def rows(self) -> list[list[int]]: ...


class DirectCopy:
    """Results that are on the CPU already, or on a device without streams, where reading them waits."""

    __slots__ = ("_lanes",)

    def __init__(self, lanes: torch.Tensor) -> None:
        self._lanes = lanes

    def ready(self) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        return self._lanes.cpu()

    def rows(self) -> list[list[int]]:
        rows: list[list[int]] = self._lanes.tolist()
        return rows


class StreamCopy:
    """Results copied to pinned memory on a side stream, followed by an event.

    The hash runs in order on the user's stream and reads the values of that moment; only the copy uses the side stream.
    A copy `in_order` runs on the user's stream too: once the program itself has waited for that stream, it is complete.
    """

    __slots__ = ("_event", "_host", "_is_ready")

    def __init__(
        self, lanes: torch.Tensor, api: DeviceApi, *, pin_memory: bool = True, in_order: bool = False
    ) -> None:
        self._is_ready = False
        self._host = torch.empty(lanes.shape, dtype=lanes.dtype, device="cpu", pin_memory=pin_memory)
        stream = current = api.current_stream(lanes.device)
        if not in_order:
            stream = api.side_stream(lanes.device)
            stream.wait_stream(current)
        with api.on_stream(stream, lanes.device):
            self._host.copy_(lanes, non_blocking=True)
            self._event = api.event()
            self._event.record(stream)
        if not in_order:
            # The allocator must not reuse the memory on the user's stream before the copy has read it.
            lanes.record_stream(stream)

    def ready(self) -> bool:
        # Not queried again once it is complete: each query is a call into the driver.
        self._is_ready = self._is_ready or bool(self._event.query())
        return self._is_ready

    def tensor(self) -> torch.Tensor:
        if not self._is_ready:
            self._event.synchronize()
            self._is_ready = True
        return self._host

    def rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.tensor().tolist()
        return rows


def copy_to_host(lanes: torch.Tensor, *, in_order: bool = False) -> HostCopy:
    """Start the copy to the host."""
    api = api_of(lanes.device)
    return DirectCopy(lanes) if api is None else StreamCopy(lanes, api, in_order=in_order)

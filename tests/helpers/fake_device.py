"""A device module without a device, for tests of what calls it: it records calls, and to wait for it raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcheck import device_api


class FakeDevice:
    """Has the names of `torch.cuda` that ddpcheck uses, with three devices of which device 0 is current."""

    def __init__(self) -> None:
        self.captures = False
        self.captures_asked = 0
        # The devices whose memory was read.
        self.read: list[str] = []
        self.allocated = {"cuda:0": 10, "cuda:1": 20, "cuda:2": 0}
        self.default_generators = [torch.Generator().manual_seed(index) for index in range(3)]
        self.Event: Any = SimpleNamespace
        self.Stream: Any = lambda device: f"side stream of {device}"

    def tensor(self, index: int) -> Any:
        """What is read of a tensor on one of the devices."""
        return SimpleNamespace(device=torch.device("cuda", index))

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 3

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        self.captures_asked += 1
        return self.captures

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def synchronize(self, *_: Any) -> None:
        raise AssertionError("the training loop was made to wait for its device")

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        self.read.append(str(device))
        size = self.allocated[str(device)]
        return {
            "allocated_bytes": {"all": {"current": size, "peak": 3 * size, "allocated": 99, "freed": 89}},
            "reserved_bytes": {"all": {"current": 4 * size, "peak": 50}},
        }

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(
            name="Fake 100",
            uuid="GPU-0A1B2C3D-0000-0000-0000-00000000000" + str(index),
            pci_domain_id=0,
            pci_bus_id=0x3B + index,
            pci_device_id=0,
        )


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device type "cuda", as if this process used it."""
    module = FakeDevice()
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(device_api, "_apis", {})
    monkeypatch.setattr(device_api, "CAPTURE_CHECKS", [])
    monkeypatch.setattr(device_api, "accelerator_type", lambda: "cuda")
    return module

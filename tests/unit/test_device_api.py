"""The one module that knows the API of a device; test_device_boundary.py enforces that it is the only one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpcheck import device_api
from ddpcheck.device_api import DeviceApi, DeviceMemory, api_of, capturing, devices_of, memory_on, warp_size
from tests.helpers.fake_device import FakeDevice


def test_host_memory_has_no_api() -> None:
    assert api_of(torch.device("cpu")) is None
    assert api_of(torch.device("meta")) is None
    assert devices_of([torch.zeros(2), torch.zeros(2, device="meta")]) == []
    assert memory_on([torch.device("cpu")]) == DeviceMemory()
    assert not torch.cuda.is_initialized()


def test_capturing_asks_no_device_before_the_job_uses_one(fake_device: FakeDevice) -> None:
    fake_device.captures = True
    assert not capturing()
    assert fake_device.captures_asked == 0
    api_of(torch.device("cuda:1"))
    assert capturing()
    fake_device.captures = False
    assert not capturing()


def test_what_is_asked_is_asked_of_the_given_device(fake_device: FakeDevice) -> None:
    api = api_of(torch.device("cuda:1"))
    assert api is not None
    own = torch.device("cuda:1")
    assert api.current_stream(own) == "stream of cuda:1"
    assert api.side_stream(own) is api.side_stream(own)
    assert memory_on([own]) == DeviceMemory(20, 80, 60)
    assert api.memory_elsewhere(own) == {"cuda:0": 10}
    assert api.generator(own) is fake_device.default_generators[1]
    assert api.index(own) == 1
    assert api.index(torch.device("cuda")) == 0


def test_the_identity_has_the_form_of_the_driver_s(fake_device: FakeDevice) -> None:
    api = api_of(torch.device("cuda:1"))
    assert api is not None
    identity = api.identity(torch.device("cuda:1"))
    assert identity == ("Fake 100", "0a1b2c3d-0000-0000-0000-000000000001", "0000:3c:00.0")
    fake_device.get_device_properties = lambda index: SimpleNamespace(name="old")  # type: ignore[method-assign]
    assert api.identity(torch.device("cuda:1")) == ("old", "", "")


@pytest.mark.parametrize(
    ("module", "memory"),
    [
        (
            SimpleNamespace(
                memory_stats=lambda device: {
                    "allocated_bytes.all.current": 1,
                    "reserved_bytes.all.current": 2,
                    "allocated_bytes.all.peak": 3,
                }
            ),
            (1, 2, 3),
        ),
        # Statistics by other names, as on HPU: the functions are asked.
        (
            SimpleNamespace(
                memory_stats=lambda device: {"InUse": 5},
                memory_allocated=lambda device: 5,
                max_memory_allocated=lambda device: 7,
            ),
            (5, 0, 7),
        ),
        (SimpleNamespace(), (0, 0, 0)),
    ],
)
def test_memory_of_other_accelerators(module: SimpleNamespace, memory: tuple[int, ...]) -> None:
    assert DeviceApi("hpu", module).memory(torch.device("hpu:0")) == memory


def test_what_a_device_lacks_is_named() -> None:
    assert DeviceApi("hpu", SimpleNamespace()).missing() == ["memory", "random", "capture"]
    full = SimpleNamespace(
        memory_stats=None, default_generators=(), is_current_stream_capturing=None, Event=None
    )
    full.is_current_stream_capturing = bool
    assert DeviceApi("xpu", full).missing() == []


@pytest.mark.parametrize(("properties", "size"), [({"warp_size": 64}, 64), ({"warp_size": 32}, 32), ({}, 32)])
def test_threads_of_a_warp(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, properties: dict[str, int], size: int
) -> None:
    asked = lambda index: SimpleNamespace(**properties)  # noqa: E731
    monkeypatch.setattr(fake_device, "get_device_properties", asked, raising=False)
    assert warp_size(fake_device.tensor(1).device) == size
    assert warp_size(torch.device("cpu")) == 32


def test_a_device_without_streams_has_no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_api, "_apis", {})
    assert api_of(torch.device("mps")) is None


def test_no_accelerator_is_an_error_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert device_api.accelerator_type() == "cpu"
    assert device_api.available_api() is None

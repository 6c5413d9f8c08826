"""Records the devices of each module: identity, digest algorithm, backend, and what they cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.device_api import api_of, on_device
from ddpcheck.probes.digest import make_digester
from ddpcheck.probes.probe import Probe
from ddpcheck.records.backend_names import backend_on
from ddpcheck.records.kinds.rank import DeviceRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule


class DeviceProbe(Probe):
    """Writes nothing for a module on the CPU."""

    name = "device"

    def after_wrap(self, tracked: TrackedModule) -> None:
        tensors = [*tracked.tensors(tracked.parameters), *tracked.tensors(tracked.buffers)]
        for device in dict.fromkeys(tensor.device for tensor in tensors if on_device(tensor)):
            self.context.write(describe(tracked.index, device))


def describe(module: int, device: torch.device) -> DeviceRecord:
    api = api_of(device)
    algorithm = make_digester(device.type).algorithm
    backend = backend_of(device.type)
    if api is None:
        return DeviceRecord(
            module, str(device), algorithm, backend, missing=["clock", "memory", "random", "capture"]
        )
    identity = api.identity(device)
    return DeviceRecord(module, str(device), algorithm, backend, *identity, missing=api.missing())


def backend_of(device_type: str) -> str:
    """The backend of the default group for one device type; empty without a group."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return backend_on(str(distributed.get_backend_config()), device_type)

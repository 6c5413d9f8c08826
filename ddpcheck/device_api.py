"""The only module that knows the API of a device: streams, events, memory, generators, capture, identity.

Built on the device module of torch (`torch.cuda`, `torch.xpu`, `torch.npu`, …, also of a PrivateUse1 device) and on
`torch.accelerator` where the device module lacks something. Nothing here initialises a device that the job does not
use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

# Device types whose kernels Triton compiles; ROCm presents itself as "cuda".
TRITON_TYPES = frozenset({"cuda", "xpu"})
# The device type of NCCL, and of RCCL under ROCm.
_NCCL_TYPE = "cuda"
# Threads of a warp where the properties of a device do not say.
_WARP = 32
# The methods of `nn.Module` that copy it to a device, beside `to`.
COPYING_METHODS = ("cuda", "xpu")
# Types of memory that no device API belongs to.
_HOST_TYPES = frozenset({"cpu", "meta"})


class DeviceMemory(NamedTuple):
    """Bytes that the allocator of torch holds on one device."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0


class DeviceIdentity(NamedTuple):
    """Which physical device it is; empty where torch does not say."""

    name: str = ""
    # 32 hexadecimal digits in groups, without a prefix, as in `nvidia-smi -L`.
    uuid: str = ""
    # domain:bus:device.function, as in `lspci`.
    pci: str = ""


class DeviceApi:
    """The API of one device type. Every method takes the device: the current one may be another."""

    def __init__(self, device_type: str, module: Any) -> None:
        self.type = device_type
        self._module = module
        self._side_streams: dict[torch.device, Any] = {}
        self._capturing: Callable[[], bool] | None = getattr(module, "is_current_stream_capturing", None)

    def current_stream(self, device: torch.device) -> Any:
        """The stream of the job's work on `device`, in this thread."""
        if hasattr(self._module, "current_stream"):
            return self._module.current_stream(device)
        return _accelerator().current_stream(device)

    def side_stream(self, device: torch.device) -> Any:
        """A stream for copies to the host, one per device."""
        stream = self._side_streams.get(device)
        if stream is None:
            make = getattr(self._module, "Stream", None) or torch.Stream
            stream = self._side_streams[device] = make(device)
        return stream

    @contextmanager
    def on_stream(self, stream: Any, device: torch.device) -> Iterator[None]:
        """`stream` and `device`, to which it belongs, are current inside."""
        # The device first: to leave the stream of another device makes the previous device current for good. In a
        # process that has not used that one, this opens a context there, which takes hundreds of megabytes.
        with (
            self.guard(device),
            self._module.stream(stream) if hasattr(self._module, "stream") else _GenericStream(stream),
        ):
            yield

    def stream_id(self, stream: Any) -> int:
        """Distinguishes the streams of one device."""
        return int(stream.stream_id)

    def event(self, timing: bool = False) -> Any:
        """An event. Record it with `record(event, device)`: without a stream it would take the current device."""
        if hasattr(self._module, "Event"):
            return self._module.Event(enable_timing=timing)
        make: Any = torch.Event
        return make(self.type, enable_timing=timing)

    def record(self, event: Any, device: torch.device) -> None:
        """Record `event` behind the job's work on `device`."""
        event.record(self.current_stream(device))

    def guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context manager that makes `device` current, as launching a kernel needs it."""
        make: Any = getattr(self._module, "device", None)
        if make is not None:
            context: AbstractContextManager[Any] = make(device)
            return context
        index: Any = getattr(_accelerator(), "device_index", None)
        return nullcontext() if index is None else index(device.index or 0)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work on `device`."""
        if hasattr(self._module, "synchronize"):
            self._module.synchronize(device)
        else:
            _accelerator().synchronize(device)

    def capturing(self) -> bool:
        """Whether the current stream of this thread is captured into a graph."""
        return self._capturing is not None and bool(self._capturing())

    def initialized(self) -> bool:
        """Whether this process uses the device type; if not, reading must not create a context."""
        check = getattr(self._module, "is_initialized", None)
        return True if check is None else bool(check())

    def available(self) -> bool:
        check = getattr(self._module, "is_available", None)
        return check is None or bool(check())

    def count(self) -> int:
        return int(self._module.device_count()) if hasattr(self._module, "device_count") else 1

    def index(self, device: torch.device) -> int:
        """The index of `device`; that of the current one if it has none."""
        index: int | None = device.index
        if index is None and hasattr(self._module, "current_device"):
            index = self._module.current_device()
        return index or 0

    def set_device(self, index: int) -> None:
        """Make a device current for good; only for processes of ddpcheck itself."""
        self._module.set_device(index)

    def has_memory_statistics(self) -> bool:
        return any(hasattr(self._module, name) for name in _MEMORY)

    def memory(self, device: torch.device) -> DeviceMemory:
        """Statistics that the allocator keeps on the host: reading them waits for nothing."""
        if not self.initialized():
            return DeviceMemory()
        module = self._module
        # The nested form is the fastest: torch does not sort 100 names.
        for name in ("memory_stats_as_nested_dict", "memory_stats"):
            if hasattr(module, name):
                memory = memory_from_statistics(getattr(module, name)(device))
                if memory is not None:
                    return memory
        values = [
            int(getattr(module, name)(device)) if hasattr(module, name) else 0 for name in _MEMORY_FUNCTIONS
        ]
        return DeviceMemory(*values)

    def memory_elsewhere(self, own: torch.device) -> dict[str, int]:
        """What this process holds on other devices of the type, as after a load without `map_location`."""
        if not self.initialized():
            return {}
        index = self.index(own)
        others = [torch.device(self.type, other) for other in range(self.count()) if other != index]
        held = {str(device): self.memory(device).allocated for device in others}
        return {name: size for name, size in held.items() if size}

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The default generator of `device`; None where it was not used yet, or torch does not give it."""
        generators = getattr(self._module, "default_generators", ())
        index = self.index(device)
        if not self.initialized() or index >= len(generators):
            return None
        generator: torch.Generator = generators[index]
        return generator

    def properties(self, device: torch.device) -> Any:
        """What torch knows of a device that the job uses; None if nothing."""
        if self.initialized() and hasattr(self._module, "get_device_properties"):
            with suppress(RuntimeError, AssertionError, NotImplementedError):
                return self._module.get_device_properties(self.index(device))
        return None

    def identity(self, device: torch.device) -> DeviceIdentity:
        """Name, UUID and PCI id of a device that the job uses."""
        properties = self.properties(device)
        uuid = str(getattr(properties, "uuid", "") or "").lower()
        for prefix in ("gpu-", "mig-"):
            uuid = uuid.removeprefix(prefix)
        return DeviceIdentity(str(getattr(properties, "name", "") or ""), uuid, _pci(properties))

    def missing(self) -> list[str]:
        """What the device module cannot do, by the names that the records use."""
        module = self._module
        absent = {
            "clock": not (hasattr(module, "Event") or hasattr(torch, "Event")),
            "memory": not self.has_memory_statistics(),
            "random": not hasattr(module, "default_generators"),
            "capture": self._capturing is None,
        }
        return [name for name, lacks in absent.items() if lacks]

    def graph_classes(self) -> list[type]:
        """The classes whose `capture_end` and `replay` a job calls; empty where the device has no graphs."""
        names = [name for name in dir(self._module) if name.endswith("Graph") and name[0] != "_"]
        candidates = [getattr(self._module, name) for name in names]
        candidates.append(getattr(_accelerator(), "Graph", None))
        return [each for each in candidates if isinstance(each, type) and hasattr(each, "replay")]


class _GenericStream:
    """`with stream` for versions of torch whose streams are not context managers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = _accelerator().current_stream(self._stream.device)
        _accelerator().set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        _accelerator().set_stream(self._before)


_MEMORY_FUNCTIONS = ("memory_allocated", "memory_reserved", "max_memory_allocated")
_MEMORY = ("memory_stats_as_nested_dict", "memory_stats", *_MEMORY_FUNCTIONS)

_apis: dict[str, DeviceApi | None] = {}
# Of the device types that the job uses and that can capture. Empty in a job on the CPU.
CAPTURE_CHECKS: list[Callable[[], bool]] = []


def _accelerator() -> Any:
    """`torch.accelerator`, which appeared in torch 2.6; None before."""
    return getattr(torch, "accelerator", None)


def on_device(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` are in the memory of a device."""
    return tensor.device.type not in _HOST_TYPES


def api_of(device: torch.device) -> DeviceApi | None:
    """The API of the device's type; None on the CPU, and where the device has no streams.

    Call it for devices that the job uses: from the first call on, `capturing` asks that device type.
    """
    kind = device.type
    if kind in _HOST_TYPES:
        return None
    if kind not in _apis:
        _apis[kind] = _find(kind)
        api = _apis[kind]
        if api is not None and "capture" not in api.missing():
            CAPTURE_CHECKS.append(api.capturing)
    return _apis[kind]


def _find(kind: str) -> DeviceApi | None:
    module: Any = getattr(torch, kind, None)
    if module is None:
        return None
    has_streams = hasattr(module, "current_stream") and hasattr(module, "Event")
    # Before torch 2.6 there are no streams without a device type.
    generic = hasattr(_accelerator(), "current_stream") and kind == accelerator_type()
    return DeviceApi(kind, module) if has_streams or generic else None


def capturing() -> bool:
    """Whether a graph is being captured on the current stream of a device that the job uses.

    Initialises no device.
    """
    return any(check() for check in CAPTURE_CHECKS)


def graph_classes() -> list[type]:
    """The graph classes of the device types that the job uses."""
    return list(
        dict.fromkeys(kind for api in _apis.values() if api is not None for kind in api.graph_classes())
    )


def accelerator_type() -> str:
    """The device type that this build of torch supports beside the CPU; "cpu" if none. Initialises nothing."""
    current: Any = getattr(_accelerator(), "current_accelerator", None)
    # torch 2.6 raises an error instead of returning None.
    with suppress(RuntimeError):
        device = current() if current is not None else None
        if device is not None:
            return str(device.type)
    return "cuda" if current is None and torch.version.cuda else "cpu"


def available_api() -> DeviceApi | None:
    """The API of an accelerator that this process could use; None on a machine without one."""
    kind = accelerator_type()
    module: Any = getattr(torch, kind, None)
    if kind in _HOST_TYPES or module is None:
        return None
    api = DeviceApi(kind, module)
    return api if api.available() else None


def default_backend(device_type: str) -> str:
    """The backend that torch takes for a device type if the program names none; empty if it has none."""
    distributed: Any = torch.distributed
    defaults = getattr(getattr(distributed, "Backend", None), "default_device_backend_map", {})
    return str(defaults.get(device_type, "nccl" if device_type == _NCCL_TYPE else ""))


def nccl_version() -> str:
    """Of the NCCL or RCCL that torch links to; empty if it links to none. Initialises no device."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return ""
    module: Any = getattr(torch, _NCCL_TYPE, None)
    with suppress(AttributeError, RuntimeError):
        return ".".join(map(str, module.nccl.version()))
    return ""


def takes_register_limit(device: torch.device) -> bool:
    """Whether the compiler of the device takes a limit of registers per thread: ptxas does, that of ROCm does not."""
    return device.type == _NCCL_TYPE and torch.version.hip is None


def warp_size(device: torch.device) -> int:
    """Threads that execute together: 32, and 64 on AMD's accelerators."""
    api = api_of(device)
    properties = None if api is None else api.properties(device)
    return int(getattr(properties, "warp_size", 0) or _WARP)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices with an API that hold some of the tensors, in the order of their first tensor."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if api_of(device) is not None]


def memory_on(devices: Iterable[torch.device]) -> DeviceMemory:
    """The sum over devices that the job uses."""
    rows = [api.memory(device) for device in devices if (api := api_of(device)) is not None]
    return DeviceMemory(*map(sum, zip(*rows, strict=True))) if rows else DeviceMemory()


def memory_of_process() -> DeviceMemory:
    """The sum over all devices of the accelerator; zeros, and no context, where the process does not use it."""
    kind = accelerator_type()
    module: Any = getattr(torch, kind, None)
    # Initialised is asked first: the number of devices is a call into the driver.
    if kind in _HOST_TYPES or module is None or not DeviceApi(kind, module).initialized():
        return DeviceMemory()
    return memory_on(torch.device(kind, index) for index in range(DeviceApi(kind, module).count()))


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of devices that the job uses."""
    candidates = [api.generator(device) for device in devices if (api := api_of(device)) is not None]
    return [generator for generator in candidates if generator is not None]


def math_settings() -> list[bool]:
    """Settings of the libraries of the NCCL device type that change the bits of results."""
    backends: Any = torch.backends
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    of_matmul = getattr(getattr(backends, _NCCL_TYPE, None), "matmul", None)
    library = getattr(backends, "cudnn", None)
    return [
        *(bool(getattr(library, name, False)) for name in names),
        bool(getattr(of_matmul, "allow_tf32", False)),
    ]


def direct_storage_file() -> Any:
    """The class that reads files into device memory without the host; None where torch has not imported it."""
    return getattr(sys.modules.get("torch.cuda.gds"), "GdsFile", None)


def memory_from_statistics(raw: Mapping[str, Any]) -> DeviceMemory | None:
    """From the statistics of an allocator, nested or flat; None if it uses other names."""
    if "allocated_bytes" in raw:
        allocated = raw["allocated_bytes"].get("all", {})
        reserved = raw.get("reserved_bytes", {}).get("all", {})
        return DeviceMemory(allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0))
    if "allocated_bytes.all.current" in raw:
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        return DeviceMemory(*(int(raw.get(name, 0)) for name in names))
    return None


def _pci(properties: Any) -> str:
    bus = getattr(properties, "pci_bus_id", None)
    device = getattr(properties, "pci_device_id", None)
    if not isinstance(bus, int) or not isinstance(device, int):
        return ""
    return f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{device:02x}.0"

"""The device type "sim": loads the native part, and is what `torch.sim` refers to.

Devices whose memory is host memory. `SIM_ACCELERATOR` in the environment selects how they behave, as a list of words:
`log`, `threaded`, `lag=N`, `delay=MICROSECONDS`, `unified`, and how many there are: `devices=N`, 2 without it.
`configure` does the same for this process, except for the number of devices.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.accelerator import recurrent
from tests.accelerator.build import MODULE, library

TYPE = "sim"
BACKEND = "simccl"
ENV = "SIM_ACCELERATOR"
_NUMBERS = ("lag", "delay")
_DEVICES = "devices="


def _load() -> Any:
    path = str(library())
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


native: Any = _load()


# Devices on which this process has a context. As on CUDA, it takes memory, and whatever sets the device opens one.
contexts: set[int] = set()


def set_device(device: Any) -> None:
    native.exchange_device(_index(device))
    contexts.add(_index(device))


class Device:
    """`torch.sim.device`: makes a device current. On leaving, no context is opened, as on CUDA."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _index()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        native.exchange_device(self._before)


def set_stream(chosen: torch.Stream) -> None:
    if chosen.device.index != _index():
        set_device(chosen.device)
    torch.accelerator.set_stream(chosen)


class StreamContext:
    """`torch.sim.stream`. As with `torch.cuda.stream`, leaving it sets the device that was current before."""

    def __init__(self, chosen: torch.Stream) -> None:
        self._chosen = chosen
        self._before: torch.Stream | None = None
        self._before_there: torch.Stream | None = None

    def __enter__(self) -> torch.Stream:
        self._before = current_stream()
        if self._before.device != self._chosen.device:
            self._before_there = current_stream(self._chosen.device)
        set_stream(self._chosen)
        return self._chosen

    def __exit__(self, *error: object) -> None:
        for before in (self._before_there, self._before):
            if before is not None:
                set_stream(before)


class SimGraph:
    """`torch.sim.SimGraph`, with the methods of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._native = native.NativeGraph()
        self._device = native.current_device()

    def capture_begin(self) -> None:
        self._device = native.current_device()
        self._native.begin(self._device)

    def capture_end(self) -> None:
        self._native.end()

    def replay(self) -> None:
        self._native.replay(self._device)


def _index(device: Any = None) -> int:
    if device is None:
        return int(native.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(native.current_device()) if index is None else int(index)


def make_stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device(TYPE, _index(device)), priority=priority)


def make_event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(TYPE, enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(TYPE, _index(device)))


@contextmanager
def graph(captured: SimGraph, pool: object = None, stream: torch.Stream | None = None) -> Iterator[None]:
    """Capture what is launched inside, on `stream` or a stream of its own. Each graph has memory of its own."""
    side = make_stream() if stream is None else stream
    side.wait_stream(current_stream())
    torch.sim.synchronize()  # type: ignore[attr-defined]
    with side:
        captured.capture_begin()
        try:
            yield
        finally:
            captured.capture_end()
    current_stream().wait_stream(side)


def _memory_stats(device: Any = None) -> dict[str, int]:
    allocated, reserved, peak = native.memory(_index(device))
    return {
        "allocated_bytes.all.current": allocated,
        "reserved_bytes.all.current": reserved,
        "allocated_bytes.all.peak": peak,
    }


def _manual_seed_all(seed: int) -> None:
    for generator in torch.sim.default_generators:  # type: ignore[attr-defined]
        generator.manual_seed(seed)


def _generator(device: Any) -> torch.Generator:
    generator: torch.Generator = torch.sim.default_generators[_index(device)]  # type: ignore[attr-defined]
    return generator


def _module() -> ModuleType:
    module: Any = ModuleType(f"torch.{TYPE}")
    module.is_available = lambda: True
    module.is_initialized = lambda: any(native.memory(index)[1] for index in range(native.device_count()))
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = set_device
    module.device = Device
    module.Stream, module.Event, module.stream = make_stream, make_event, StreamContext
    module.current_stream = current_stream
    module.synchronize = lambda device=None: native.synchronize_device(_index(device))
    module.is_current_stream_capturing = lambda: native.is_capturing(native.current_device())
    module.SimGraph, module.graph = SimGraph, graph
    module.memory_stats = _memory_stats
    module.memory_allocated = lambda device=None: native.memory(_index(device))[0]
    module.memory_reserved = lambda device=None: native.memory(_index(device))[1]
    module.max_memory_allocated = lambda device=None: native.memory(_index(device))[2]
    module.default_generators = tuple(
        native.default_generator(index) for index in range(native.device_count())
    )
    module.manual_seed_all = _manual_seed_all
    module.manual_seed = lambda seed: _generator(None).manual_seed(seed)
    module.get_rng_state = lambda device=None: _generator(device).get_state()
    module.set_rng_state = lambda state, device=None: _generator(device).set_state(state)
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_properties = lambda device=None: SimpleNamespace(
        name="Simulated accelerator",
        uuid=f"51300000-0000-0000-0000-00000000000{_index(device)}",
        pci_bus_id=0x40 + _index(device),
        pci_device_id=0,
        pci_domain_id=0,
    )
    return module


def _backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    distributed: Any = torch.distributed
    return native.SimBackend(distributed.ProcessGroupGloo(store, rank, size, timeout))


def configure(words: str = "") -> None:
    """Select how the devices behave from here on; waits for all work first. Without words: kernels run at once."""
    settings = native.Settings()
    for word in filter(None, words.replace(",", " ").split()):
        name, _, value = word.partition("=")
        setattr(settings, name, int(value) if name in _NUMBERS else True)
        settings.threaded |= name in _NUMBERS
    native.configure(settings)


def _exit() -> None:
    # Threads of streams must not run kernels while the libraries of torch are unloaded.
    native.stop()


def install() -> None:
    """Make the device type known to torch."""
    if hasattr(torch, TYPE):
        return
    torch.utils.rename_privateuse1_backend(TYPE)
    words = os.environ.get(ENV, "").replace(",", " ").split()
    for word in words:
        if word.startswith(_DEVICES):
            native.set_device_count(int(word.removeprefix(_DEVICES)))
    torch._register_device_module(TYPE, _module())
    sys.modules[f"torch.{TYPE}"] = torch.sim  # type: ignore[attr-defined]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.distributed.Backend.register_backend(BACKEND, _backend, devices=[TYPE])
    recurrent.register()
    configure(" ".join(word for word in words if not word.startswith(_DEVICES)))
    atexit.register(_exit)

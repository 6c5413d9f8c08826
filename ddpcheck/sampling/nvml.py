"""All GPUs of the node and their topology, through NVML, read in a separate thread: a driver may never answer."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Generic, TypeVar

from ddpcheck.sampling import amd
from ddpcheck.sampling.amd import AmdGpus
from ddpcheck.sampling.nvml_device import Device, bus_id

# The names that nvidia-smi uses for the nearest common ancestor of two GPUs.
_ANCESTORS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# As numbers: pynvml defines the first constant as a tuple by mistake.
_READ, _NVLINK = 0, 2
_P2P_OK = 0
_SWITCH = 2
_LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = "no NVIDIA driver on this node"


class Gpus:
    """All GPUs that NVML reports, with MIG slices as part of their GPU."""

    def __init__(self) -> None:
        self.note = ""
        self._nvml: ModuleType | None = None
        self._devices: list[Device] = []
        self._driver = ""

    def open(self) -> None:
        """Initialize NVML and find the GPUs. Call `read` from the same thread."""
        try:
            # Without a driver, skip the import of pynvml, which takes 0.1 s.
            ctypes.CDLL(_LIBRARY)
        except OSError:
            self.note = NO_DRIVER
            return
        try:
            import pynvml
        except ImportError:
            self.note = "nvidia-ml-py is not installed: GPUs are not sampled"
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = self._find_devices(pynvml)
        except pynvml.NVMLError as error:
            self.note = f"NVML does not answer: {error}"
            self._devices = []

    def _find_devices(self, nvml: ModuleType) -> list[Device]:
        self._driver = str(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                devices.append(Device(nvml, index))
            except nvml.NVMLError as error:  # the other GPUs are still sampled
                self.note = f"GPU {index} cannot be reached: {error}"
        return devices

    def describe(self) -> dict[str, Any]:
        """Properties that do not change. Call after the first reading, which finds out what is not supported."""
        if self._nvml is None or not self._devices:
            return {"note": self.note or "no GPU"}
        return {
            "note": self.note,
            "driver": self._driver,
            "gpus": [device.describe() for device in self._devices],
            **topology(self._nvml, self._devices),
        }

    def read(self) -> list[dict[str, Any]]:
        return [device.read() for device in self._devices]

    def close(self) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                self.note = "NVML could not be closed"
            self._nvml = None


def open_gpus() -> Gpus | AmdGpus:
    """The GPUs of this node, of either vendor. Call `read` from the same thread."""
    gpus = Gpus()
    gpus.open()
    if gpus.note == NO_DRIVER and amd.is_present():
        of_amd = AmdGpus()
        of_amd.open()
        # The package may be installed on a machine without a GPU.
        if of_amd.has_gpus or amd.DRIVER_FILE.exists():
            return of_amd
    return gpus


def topology(nvml: ModuleType, devices: list[Device]) -> dict[str, Any]:
    """Two matrices: the connection of each pair of GPUs, and whether each can read the memory of the other."""
    peers = [_peers(nvml, device) for device in devices]
    buses = [device.bus() for device in devices]
    return {
        "topology": [
            [_connection(nvml, devices, peers, buses, one, other) for other in range(len(devices))]
            for one in range(len(devices))
        ],
        "p2p": [[one is other or _p2p(nvml, one, other, _READ) for other in devices] for one in devices],
    }


def _connection(
    nvml: ModuleType, devices: list[Device], peers: list[list[str]], buses: list[str], one: int, other: int
) -> str:
    if one == other:
        return "X"
    links = peers[one].count(buses[other]) if buses[other] else 0
    if not links and _p2p(nvml, devices[one], devices[other], _NVLINK):
        # Through a switch, every link leads to all GPUs of the switch.
        links = min(peers[one].count("switch"), peers[other].count("switch"))
    if links:
        return f"NV{links}"
    level = devices[one].calls.ask(
        "topology", nvml.nvmlDeviceGetTopologyCommonAncestor, devices[other].calls.handle
    )
    return _ANCESTORS.get(level, "?")


def _peers(nvml: ModuleType, device: Device) -> list[str]:
    """The other end of each active link: the bus id of a GPU, or "switch"."""
    peers = []
    for link in device.links:
        kind = device.calls.ask("NVLink peers", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link)
        remote = device.calls.ask("NVLink remote", nvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
        peers.append("switch" if kind == _SWITCH else bus_id(remote))
    return peers


def _p2p(nvml: ModuleType, one: Device, other: Device, what: int) -> bool:
    status = one.calls.ask("P2P", nvml.nvmlDeviceGetP2PStatus, other.calls.handle, what)
    return status is not None and status == _P2P_OK


Result = TypeVar("Result")
Reading = list[dict[str, Any]]
NO_ANSWER = "NVML has not answered"
# How long a sample waits for NVML. Without the persistence daemon, the driver takes seconds to start.
ANSWER_SECONDS = 1.0


class ThreadedCall(Generic[Result]):
    """Runs one call at a time in a daemon thread, so that a call that never returns does not block the exit."""

    def __init__(self, name: str) -> None:
        self.busy = False  # a call was started and its result not taken
        self.cpu_seconds = 0.0  # processor time of all calls that have returned
        self._calls: SimpleQueue[Callable[[], Result] | None] = SimpleQueue()
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, call: Callable[[], Result]) -> None:
        """Start a call. No other call may be running."""
        self.busy = True
        self._done.clear()
        self._calls.put(call)

    def returned(self, seconds: float) -> bool:
        """Whether the call returns within `seconds`."""
        return self._done.wait(seconds)

    def take_result(self) -> Result | None:
        """The result of the call that has returned; raises the exception of the call."""
        self.busy = False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._result = call()
            except Exception as error:
                self._error = error
            self.cpu_seconds = time.thread_time()
            self._done.set()


class GpuSource:
    """Readings of all GPUs. A driver that does not answer delays one sample by ANSWER_SECONDS, and no others."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"note": NO_ANSWER}
        self.has_new_facts = False  # `facts` have changed since they were last read
        self._gpus: Gpus | AmdGpus = Gpus()
        self._no_gpus = False
        self._silent_since: float | None = None
        self._thread: ThreadedCall[Reading] = ThreadedCall("ddpcheck-nvml")
        self._thread.begin(self._open)

    @property
    def cpu_seconds(self) -> float:
        return self._thread.cpu_seconds

    @property
    def silent_seconds(self) -> float:
        """How long known GPUs have not answered."""
        silent = self._silent_since is not None and bool(self.facts.get("gpus"))
        return time.monotonic() - (self._silent_since or 0.0) if silent else 0.0

    def read(self) -> Reading | None:
        """None if the driver does not answer in time, or there are no GPUs."""
        if self._no_gpus:
            return None
        late = self._silent_since is not None
        started = time.monotonic()
        if not self._thread.busy:
            self._thread.begin(self._gpus.read)
        # After one timeout, only check for the result: other sources must not be delayed again.
        if not self._thread.returned(0.0 if late else ANSWER_SECONDS):
            self._silent_since = started if self._silent_since is None else self._silent_since
            return None
        self._silent_since = None
        reading = self._thread.take_result()
        if not reading:
            self.close()
            self._no_gpus = True
        # The time of a late reading is unknown.
        return None if late or self._no_gpus else reading

    def close(self) -> None:
        if self._silent_since is None and not self._no_gpus:
            self._thread.begin(self._close_nvml)
            self._thread.returned(ANSWER_SECONDS / 2)
        self._thread.close()

    def _open(self) -> Reading:
        self._gpus = open_gpus()
        reading = self._gpus.read()
        self.facts = self._gpus.describe()
        self.has_new_facts = True
        return reading

    def _close_nvml(self) -> Reading:
        self._gpus.close()
        return []

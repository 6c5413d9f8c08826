"""Takes each wait out of ddpcheck's device code in turn, and says whether the simulated accelerator noticed.

Prints a JSON object: by the name of the wait, the races and the wrong results without it; "none" is the code as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.accelerator import device, event_log, kernel
from tests.accelerator.ownership import owned

device.install()

from ddpcheck import device_api  # noqa: E402
from ddpcheck.device_api import DeviceApi  # noqa: E402
from ddpcheck.probes.digest import multilinear_torch  # noqa: E402
from ddpcheck.probes.digest.multilinear import MultilinearDigester  # noqa: E402
from ddpcheck.probes.loss import read_scalar  # noqa: E402
from ddpcheck.probes.scan import device_kernels  # noqa: E402
from ddpcheck.probes.scan.scanner import TensorScanner  # noqa: E402

ROUNDS = 20


class UnorderedStream(torch.Stream):
    """A side stream that does not wait for the job's."""

    def wait_stream(self, other: Any) -> None:
        pass


class EarlyEvent:
    """Recorded where nothing precedes it, so it is complete at once."""

    _idle: ClassVar[dict[torch.device, torch.Stream]] = {}

    def __init__(self) -> None:
        self._event = torch.Event(device.TYPE)

    def record(self, stream: torch.Stream) -> None:
        idle = self._idle.setdefault(stream.device, torch.Stream(device=stream.device))
        self._event.record(idle)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class UnawaitedEvent:
    """Nobody waits for it."""

    def record(self, stream: torch.Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _unordered(self: DeviceApi, on: torch.device) -> Any:
    return self._side_streams.setdefault(on, UnorderedStream(device=on))


@contextmanager
def _no_record_stream() -> Iterator[None]:
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.Tensor.record_stream


def _patched(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


REMOVED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "the side stream waits for the job": _patched(DeviceApi, "side_stream", _unordered),
    "memory is kept for the side stream": _no_record_stream,
    "the copy is on the side stream": _patched(
        DeviceApi, "on_stream", lambda self, stream, on: nullcontext()
    ),
    "the event follows the copy": _patched(DeviceApi, "event", lambda self, timing=False: EarlyEvent()),
    "results are read after the event": _patched(
        DeviceApi, "event", lambda self, timing=False: UnawaitedEvent()
    ),
    "each stream has its table": _patched(DeviceApi, "stream_id", lambda self, stream: 0),
    "keys are complete": _patched(multilinear_torch, "_synchronized", lambda keys: keys),
    "the table's device is current": _patched(DeviceApi, "guard", lambda self, on: nullcontext()),
}


def begin(modes: str) -> None:
    """As after wrapping in a new process: the kernel was compared with torch, and nothing else is on the device."""
    device.configure(modes)
    device_api._apis.clear()
    device_api.CAPTURE_CHECKS.clear()
    kernel.register()
    with owned():
        for index in range(2):
            choice = device_kernels.kernel_of(torch.device(device.TYPE, index))
            assert choice.kernel is not None, choice.detail
    multilinear_torch._word_keys.clear()
    multilinear_torch._block_keys.clear()
    device_api._apis.clear()
    event_log.take()


class Pipeline:
    """Tensors that the job writes on one stream, which ddpcheck reads there."""

    def __init__(self, on: torch.device, stream: torch.Stream) -> None:
        self.stream = stream
        self._host = [torch.arange(size, dtype=torch.float32) for size in (3, 700, 5000)]
        self._tensors = [each.to(on) for each in self._host]
        self._scanner = TensorScanner()
        self._results: list[tuple[Any, list[bytes], float]] = []
        self._wrong = self._rounds = 0

    def step(self) -> None:
        with self.stream:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.add_(1)
                host.add_(1)
            loss = self._tensors[1].sum()
            expected = MultilinearDigester().submit(self._host).result(), float(self._host[1].sum())
            with owned():
                mask = bytes([1, 1, 1])
                self._scanner.update(self._tensors)
                scan = self._scanner.scan(self._tensors, mask, mask)
                # Some results are read while they are computed, others much later.
                self._rounds += 1
                if self._rounds % 2 == 0:
                    self._wrong += _leaves(scan) != expected[0]
                digests = MultilinearDigester().submit(self._tensors)
                scalar = read_scalar(loss)
            # The job takes and writes memory of the sizes that ddpcheck has just freed.
            for shape in ((3, 5), (3, 2), (1, 1)):
                torch.empty(shape, dtype=torch.int64, device=loss.device).fill_(-1)
            self._results.append(((scan, digests, scalar), *expected))

    def wrong(self) -> int:
        """How many results are not those of the tensors at that time."""
        with owned():
            return self._wrong + sum(
                _leaves(scan) != expected or digests.result() != expected or scalar.value() != total
                for (scan, digests, scalar), expected, total in self._results
            )


def _leaves(scan: Any) -> list[bytes] | None:
    try:
        return list(scan.leaves())
    except ValueError:
        return None  # the root of a negative sum of squares: memory that nobody has written


def work() -> int:
    """Independent work on two streams of one device and on the other device; device 0 is current."""
    here, there = (torch.device(device.TYPE, index) for index in range(2))
    first = torch.sim.current_stream(here)  # type: ignore[attr-defined]
    second = torch.sim.Stream(here)  # type: ignore[attr-defined]
    other = torch.sim.current_stream(there)  # type: ignore[attr-defined]
    pipelines = [Pipeline(here, first), Pipeline(here, second), Pipeline(there, other)]
    # Never written again: read on two streams by one scanner.
    shared, scanner = [torch.ones(50, device=here), torch.zeros(9, device=here)], TensorScanner()
    for on in (here, there):
        torch.sim.synchronize(on)  # type: ignore[attr-defined]
    for _ in range(ROUNDS):
        for stream in (first, second):
            with stream, owned():
                scanner.update(shared)
                scanner.scan(shared, bytes([1, 1]))
        for pipeline in pipelines:
            pipeline.step()
    return sum(pipeline.wrong() for pipeline in pipelines)


def races(remove: Callable[[], AbstractContextManager[Any]]) -> dict[str, Any]:
    begin("log")
    with remove():
        work()
    found = [race for race in event_log.races(event_log.take()) if race.of_ddpcheck]
    return {"races": len(found), "example": str(found[0]) if found else ""}


def wrong_values(remove: Callable[[], AbstractContextManager[Any]]) -> dict[str, Any]:
    begin("delay=4000")
    with remove():
        wrong = work()
    # A launch that fails makes ddpcheck read the tensors by operators of torch from then on.
    lost = [choice.detail for choice in device_kernels.losses().values()]
    return {"wrong": wrong, "error": "; ".join(lost)}


def in_child(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A kernel that reads a table too early reads from any address, and may end its process."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            result = function()
        except RuntimeError as error:
            result = {"error": str(error)}
        os.write(sender, json.dumps(result).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as source:
        text = source.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    received: dict[str, Any] = json.loads(text) if text else {"wrong": 1, "example": f"ended with {status}"}
    return received


def observe(remove: Callable[[], AbstractContextManager[Any]]) -> dict[str, Any]:
    observed = {"races": 0, "wrong": 0, "error": "", "example": ""}
    for check in (races, wrong_values):
        observed |= in_child(partial(check, remove))
    return observed


if __name__ == "__main__":
    print(json.dumps({name: observe(remove) for name, remove in REMOVED.items()}))

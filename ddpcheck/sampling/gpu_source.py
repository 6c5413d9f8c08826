"""Reads the GPUs in a separate thread: a driver may take long to answer, or never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ddpcheck.sampling.nvml import Gpus

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
        self._gpus = Gpus()
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
        self._gpus.open()
        reading = self._gpus.read()
        self.facts = self._gpus.describe()
        self.has_new_facts = True
        return reading

    def _close_nvml(self) -> Reading:
        self._gpus.close()
        return []

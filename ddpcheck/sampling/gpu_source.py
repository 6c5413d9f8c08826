"""The GPUs, asked on a thread of their own: a driver may take long to answer, or never do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ddpcheck.sampling.nvml import Gpus

Answer = TypeVar("Answer")


class ThreadedCall(Generic[Answer]):
    """One call at a time. A daemon: a call that never returns keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self.busy = False  # a call was begun whose answer nobody has taken
        self.cpu_seconds = 0.0  # processor time of all calls that have returned
        self._calls: SimpleQueue[Callable[[], Answer] | None] = SimpleQueue()
        self._done = threading.Event()
        self._answer: Answer | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, call: Callable[[], Answer]) -> None:
        """Only where none is under way."""
        self.busy = True
        self._done.clear()
        self._calls.put(call)

    def returned(self, seconds: float) -> bool:
        """Whether the call comes back within so long."""
        return self._done.wait(seconds)

    def answer(self) -> Answer | None:
        """Of the call that has returned; raises what it raised."""
        self.busy = False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._answer

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answer = call()
            except Exception as error:
                self._error = error
            self.cpu_seconds = time.thread_time()
            self._done.set()


Reading = list[dict[str, Any]]
NO_ANSWER = "NVML has not answered"
# For which a sample waits. Without a daemon that keeps it up, a driver takes seconds to start.
PATIENCE_SECONDS = 1.0


class GpuSource:
    """Everything else is sampled on while the driver is silent; once it speaks, so are the GPUs."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"note": NO_ANSWER}
        self.news = False  # `facts` have changed since they were taken
        self._gpus = Gpus()
        self._none = False
        self._silent_since: float | None = None
        self._aside: ThreadedCall[Reading] = ThreadedCall("ddpcheck-nvml")
        self._aside.begin(self._meet)

    @property
    def cpu_seconds(self) -> float:
        return self._aside.cpu_seconds

    @property
    def silent_seconds(self) -> float:
        """For how long GPUs that were known have told nothing."""
        known = self._silent_since is not None and bool(self.facts.get("gpus"))
        return time.monotonic() - (self._silent_since or 0.0) if known else 0.0

    def read(self) -> Reading | None:
        """None where the driver does not answer in time, or has no GPUs."""
        if self._none:
            return None
        late = self._silent_since is not None
        asked = time.monotonic()
        if not self._aside.busy:
            self._aside.begin(self._gpus.read)
        # One that was waited for in vain is only looked after: the other sources are not to be held up again.
        if not self._aside.returned(0.0 if late else PATIENCE_SECONDS):
            self._silent_since = asked if self._silent_since is None else self._silent_since
            return None
        self._silent_since = None
        found = self._aside.answer()
        if not found:
            self.close()
            self._none = True
        # Nobody knows to which moment a late answer belongs.
        return None if late or self._none else found

    def close(self) -> None:
        if self._silent_since is None and not self._none:
            self._aside.begin(self._end)
            self._aside.returned(PATIENCE_SECONDS / 2)
        self._aside.close()

    def _meet(self) -> Reading:
        self._gpus.open()
        found = self._gpus.read()
        self.facts = self._gpus.describe()
        self.news = True
        return found

    def _end(self) -> Reading:
        self._gpus.close()
        return []

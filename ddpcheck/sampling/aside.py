"""Calls on a thread of their own: whoever asks for an answer waits for so long and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Aside(Generic[Answer]):
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

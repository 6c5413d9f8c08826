"""Dumps the stack of this rank when the launcher requests it, and sends heartbeats until then.

A separate thread answers, so it can respond while the training thread waits in a collective: collectives release the
GIL.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddpcheck import guard
from ddpcheck.guard import GUARD
from ddpcheck.privacy import mask_text
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.awaited import awaited, loops_around
from ddpcheck.probes.process.collective_progress import collectives_issued, group_progress, progress_mark
from ddpcheck.records.kinds.rank import StackRecord
from ddpcheck.records.reasons import LastEvent

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# A deeper stack is truncated in the middle: the current call and the begin of the program are kept.
MAX_INNER = 40
MAX_OUTER = 10
OWN_THREADS = "ddpcheck"
# Calls through our own patches are left out of stacks.
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.abspath(guard.__file__)), "")


class StackDumpProbe(Probe):
    """Does nothing without an exchange: no launcher could send a request."""

    name = "standing"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._exchange = context.exchange if context.config.hang_timeout else None
        self._beats = 0
        self._step = 0
        self._last_event: LastEvent | None = None
        self._left = False
        self._answered = 0
        self._introduced = False
        # Collectives that were enqueued and completed when the listener last looked.
        self._progress_mark: tuple[Any, ...] = ()
        # The training thread: the latest one that emitted an event.
        self._thread = threading.get_ident()
        self._native = threading.get_native_id()
        self.listen = GUARD.protect(self.name, "listen", self._listen)
        # Guarded too: if no thread can be started, the other probes must still work.
        GUARD.protect(self.name, "begin", self._begin)()

    def _begin(self) -> None:
        if self._exchange is not None:
            self._answered = self._exchange.requested_stacks()
            _Listener(self, self.context.config.listen_seconds).start()

    def before_wrap(self, tracked: TrackedModule) -> None:
        self._record_event(LastEvent.BEFORE_WRAP)

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._record_event(LastEvent.AFTER_WRAP)

    def before_forward(self, tracked: TrackedModule) -> None:
        self._record_event(LastEvent.BEFORE_FORWARD)

    def buffers_synced(self, tracked: TrackedModule) -> None:
        self._record_event(LastEvent.BUFFERS_SYNCED)

    def backward_begun(self, tracked: TrackedModule) -> None:
        # Backwards on a device run in other threads.
        self._last_event = LastEvent.BACKWARD_BEGUN
        self._beat()

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        self._last_event = LastEvent.GRADIENTS_REDUCED
        self._beat()

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._record_event(LastEvent.BEFORE_STEP)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        if optimizer.steps >= self._step:
            self._step = optimizer.steps + 1
        self._record_event(LastEvent.AFTER_STEP)

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        """A batch is drawn, for training or evaluation: that is progress too."""
        self._beat()

    def before_exit(self) -> None:
        self._left = True
        self._beat()

    def _record_event(self, event: LastEvent) -> None:
        self._last_event = event
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread, self._native = thread, threading.get_native_id()
        # As in `_beat`: called for most events of a step.
        if self._exchange is not None:
            self._beats += 1
            self._exchange.beat(self._beats)

    def _beat(self) -> None:
        if self._exchange is not None:
            self._beats += 1
            self._exchange.beat(self._beats)

    def _listen(self) -> None:
        """Answer a new request of the launcher, if there is one."""
        if self._exchange is None:
            return
        if not self._introduced:
            self._introduced = True
            self._exchange.publish_threads(own_threads())
        self._notice_collectives()
        request = self._exchange.requested_stacks()
        if request != self._answered:
            self._answered = request
            self.context.write(self._record(request))

    def _notice_collectives(self) -> None:
        """A collective that was enqueued or completed is progress, also in loops that no hook sees."""
        mark = progress_mark()
        if mark != self._progress_mark:
            self._progress_mark = mark
            self._beat()

    def _record(self, request: int) -> StackRecord:
        return StackRecord(
            look=request,
            time=time.time(),
            frames=frames_of(self._thread),
            awaits=awaited(sys._current_frames().get(self._thread)),
            loops=loops_around(sys._current_frames().get(self._thread)),
            step=self._step,
            moment=self._last_event.value if self._last_event is not None else "",
            thread=self._native,
            collectives=collectives_issued(),
            left=self._left,
            groups={name: each.to_row() for name, each in group_progress().items()},
        )


class _Listener(threading.Thread):
    """Keeps no reference to the probe: that of a finished session must be garbage-collected."""

    def __init__(self, probe: StackDumpProbe, seconds: float) -> None:
        # A daemon: the process must not wait for it at exit.
        super().__init__(name=f"{OWN_THREADS}-standing", daemon=True)
        self._probe = weakref.ref(probe)
        self._seconds = seconds
        # Not time.sleep, which programs replace to speed up their clocks.
        self._never = threading.Event()

    def run(self) -> None:
        while self._serve():
            self._never.wait(self._seconds)

    def _serve(self) -> bool:
        probe = self._probe()
        if probe is None or probe.context.over or probe.name in GUARD.off:
            return False
        probe.listen()
        return True


def own_threads() -> list[int]:
    """System ids of ddpcheck's threads: their activity is not progress of the job."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(OWN_THREADS)]
    return [thread.native_id for thread in ours if thread.native_id is not None]


def frames_of(thread: int) -> list[list[Any]]:
    """The stack of a thread, innermost call first: locations only, no reference to a frame is kept."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames: list[list[Any]] = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDER):
            frames.append([mask_text(code.co_filename), frame.f_lineno or 0, code.co_name])
        frame = frame.f_back
    return frames if len(frames) <= MAX_INNER + MAX_OUTER else frames[:MAX_INNER] + frames[-MAX_OUTER:]

"""Says where this rank stands when the launcher asks, and gives it signs of progress until then.

The thread that answers is none of the user's, so it can speak while the training thread waits in a collective:
those release the interpreter's lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddpcheck import guard, torch_compat
from ddpcheck.guard import GUARD
from ddpcheck.privacy import mask_text
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.schema import StackRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# A deeper stack is kept from both ends: where it stands, and how it came there.
MOST_INNER = 40
MOST_OUTER = 10
OWN_THREADS = "ddpcheck"
# Of the stack, calls through our own patches are left out.
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.abspath(guard.__file__)), "")


class StackDumpProbe(Probe):
    """Without a board there is nobody who could ask, and nothing is done."""

    name = "standing"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._board = context.exchange if context.config.hang_timeout else None
        self._beats = 0
        self._step = 0
        self._moment = ""
        self._left = False
        self._answered = 0
        self._introduced = False
        # Of the thread that trains: the latest one that came by.
        self._thread = threading.get_ident()
        self._native = threading.get_native_id()
        self.listen = GUARD.protect(self.name, "listen", self._listen)
        # Guarded too: a system that is out of threads must not cost the other probes.
        GUARD.protect(self.name, "begin", self._begin)()

    def _begin(self) -> None:
        if self._board is not None:
            self._answered = self._board.question()
            _Listener(self, self.context.config.listen_seconds).start()

    def before_wrap(self, tracked: TrackedModule) -> None:
        self._came_to("entering")

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._came_to("wrapped")

    def before_forward(self, tracked: TrackedModule) -> None:
        self._came_to("forward")

    def buffers_synced(self, tracked: TrackedModule) -> None:
        self._came_to("buffers_synced")

    def backward_begun(self, tracked: TrackedModule) -> None:
        self._came_to("backward_begun")

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        self._came_to("reduced")

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._came_to("before_step")

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._step = max(self._step, optimizer.steps + 1)
        self._came_to("after_step")

    def sample_drawn(self, iterator: Any, index: Any) -> None:
        """Data flows, in training or in evaluation: that is progress too."""
        self._beat()

    def before_exit(self) -> None:
        self._left = True
        self._beat()

    def _came_to(self, moment: str) -> None:
        self._moment = moment
        # Backwards of a device have threads of their own.
        if moment not in ("backward_begun", "reduced"):
            self._thread = threading.get_ident()
            self._native = threading.get_native_id()
        self._beat()

    def _beat(self) -> None:
        if self._board is not None:
            self._beats += 1
            self._board.beat(self._beats)

    def _listen(self) -> None:
        """Answer the launcher's question, if there is a new one."""
        if self._board is None:
            return
        if not self._introduced:
            self._introduced = True
            self._board.introduce(own_threads())
        asked = self._board.question()
        if asked != self._answered:
            self._answered = asked
            self.context.write(self._standing(asked))

    def _standing(self, look: int) -> StackRecord:
        return StackRecord(
            look=look,
            time=time.time(),
            frames=frames_of(self._thread),
            step=self._step,
            moment=self._moment,
            thread=self._native,
            collectives=collectives_issued(),
            left=self._left,
        )


class _Listener(threading.Thread):
    """Holds on to no probe: the one of a session that is over must be able to go."""

    def __init__(self, probe: StackDumpProbe, seconds: float) -> None:
        # A daemon: a process that ends must not wait for us.
        super().__init__(name=f"{OWN_THREADS}-standing", daemon=True)
        self._probe = weakref.ref(probe)
        self._seconds = seconds
        # Not time.sleep, which programs replace to make their clocks run faster.
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
    """Ids of ddpcheck's threads, as the system knows them: what they do is no sign of life of the job."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(OWN_THREADS)]
    return [thread.native_id for thread in ours if thread.native_id is not None]


def frames_of(thread: int) -> list[list[Any]]:
    """The stack of a thread, the innermost call first: places only, and no reference to a frame is kept."""
    frame: FrameType | None = sys._current_frames().get(thread)
    found: list[list[Any]] = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FOLDER):
            found.append([mask_text(code.co_filename), frame.f_lineno or 0, code.co_name])
        frame = frame.f_back
    return found if len(found) <= MOST_INNER + MOST_OUTER else found[:MOST_INNER] + found[-MOST_OUTER:]


def collectives_issued() -> dict[str, int]:
    """By process group, as far as this torch and the backend tell; private in torch, so asked with care."""
    world = torch_compat.lookup(torch_compat.WORLD)
    names = getattr(world, "pg_names", None)
    counts: dict[str, int] = {}
    for group, name in list(names.items()) if isinstance(names, dict) else ():
        count = torch_compat.read(torch_compat.SEQUENCE_NUMBER, group)
        try:
            if count is not None:
                counts[str(name)] = int(count())
        except RuntimeError:  # a backend that does not count
            continue
    return counts

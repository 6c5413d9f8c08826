"""Records the selected steps with torch.profiler, and when each gradient was ready in them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from ddpcheck import torch_compat
from ddpcheck.patches import Patches
from ddpcheck.probes.probe import Phase, Probe, ProbeContext
from ddpcheck.probes.process.profiler_conflict import PROFILERS
from ddpcheck.records.kinds.timing import ReadyRecord, TraceRecord
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.config import Config


FOLDER = "traces"


# A script may profile itself at every step: only this many exports are recorded.
MAX_EXPORTS = 100
# Kineto logs every start and stop to stderr. It reads its level once, when the first profiler is made.
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class ProfileProbe(Probe):
    """A step begins at the end of the previous optimizer step; the first one begins with its forward."""

    name = "profile"
    phase = Phase.PROFILER

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(config.profile)

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        steps = parse_steps(context.config.profile)
        self._first, self._end = steps.ranges[0] if steps else (0, 0)
        self._step = -1
        self._recording: ProfilerSession | None = None
        self._exports = 0
        if steps:
            self._patches = Patches()
            PROFILERS.watch_exports(self._patches)
            PROFILERS.on_conflict, PROFILERS.on_export = self._stop_for_user, self._exported

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._step < 0:
            self._enter(tracked.steps)
        if tracked.backward is not None:
            tracked.backward.time_gradients = self._recording is not None

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._enter(optimizer.steps + 1)

    def _enter(self, step: int) -> None:
        """A step begins. If several optimizers share it, the first of them to step begins the next."""
        if step <= self._step or self._end == 0:
            return
        self._step = step
        if self._recording is not None:
            self._continue(step)
        elif self._first - 1 <= step < (self._end or 0) and not self._user_profiles():
            if step < self._first:
                warm_up()
            else:
                self._recording = ProfilerSession(step)

    def _continue(self, step: int) -> None:
        if self._recording is not None and step < (self._end or 0):
            self._recording.next(step)
        else:
            self._finish(step)

    def _finish(self, end: int) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        # A truncated step would look short, but it has its own mark: readers exclude it.
        if end > recording.first:
            file = recording.write(self.context.config.run_dir, self.context.rank)
            self.context.write(
                TraceRecord(file=file, first=recording.first, end=end, held_up_ns=recording.held_up_ns)
            )
        self._end = 0

    def _user_profiles(self) -> bool:
        """Whether the user's program profiles itself."""
        enabled = torch_compat.lookup(torch_compat.AUTOGRAD_PROFILING)
        if not PROFILERS.user_profiles and not (enabled is not None and enabled()):
            return False
        self._stop_for_user()
        return True

    def _stop_for_user(self) -> None:
        """The user's profiler starts or is active: stop ours for good."""
        if self._end == 0:
            return
        self._end = 0
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
        self.context.write(TraceRecord(file="", own=False))

    def _exported(self, path: str) -> None:
        self._exports += 1
        if self._exports <= MAX_EXPORTS:
            self.context.write(TraceRecord(file=path, own=False))

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        done = time.time_ns()
        backward = tracked.backward
        if backward is None or not backward.ready_times or self._recording is None:
            return
        ready = backward.ready_times
        begin = ready[0][1]
        self.context.write(
            ReadyRecord(
                module=tracked.index,
                number=backward.number,
                step=self._step,
                begin_ns=begin,
                order=[index for index, _ in ready],
                after_us=[(at - begin) // 1000 for _, at in ready],
                done_us=(done - begin) // 1000,
                limits=_limits(tracked.ddp()),
            )
        )

    def before_exit(self) -> None:
        """The job ends before the window: keep the complete steps."""
        self._finish(self._step)
        if PROFILERS.on_conflict == self._stop_for_user:
            PROFILERS.on_conflict = PROFILERS.on_export = None


def _limits(ddp: Any) -> list[int]:
    """Sizes in bytes at which DDP closes its buckets, first bucket first; the last applies to all others."""
    caps = getattr(ddp, "bucket_bytes_cap_list", None)
    if caps:
        return [int(size) for size in caps]
    cap = int(getattr(ddp, "bucket_bytes_cap", 0))
    if getattr(ddp, "bucket_bytes_cap_default", False):
        first = torch_compat.lookup(torch_compat.FIRST_BUCKET)
        return [int(first), cap] if first is not None else []
    return [cap]


class ProfilerSession:
    """Records from its creation on; must not be created inside a profiler span of ddpcheck, which could not end."""

    # How long threads of this rank were runnable without a CPU: on an overloaded machine this looks like a slow link.
    held_up_ns = 0

    def __init__(self, step: int) -> None:
        self.first = step
        self.end = step
        # Shapes are needed for the message sizes of gloo.
        self._profiler = _new_profiler(record_shapes=True)
        with PROFILERS.ours(), _silence():
            self._profiler.start()
        PROFILERS.recording = True
        self._runnable_before = _runnable_ns()
        self._mark = _mark(step)

    def next(self, step: int) -> None:
        """End a step and begin the next."""
        self._close()
        self.end = step
        self._mark = _mark(step)

    def stop(self) -> None:
        """End the last step."""
        self._close()
        self.held_up_ns = max(0, _runnable_ns() - self._runnable_before)
        PROFILERS.recording = False
        with PROFILERS.ours(), _silence():
            self._profiler.stop()

    def write(self, run_dir: str, rank: int) -> str:
        """Write the trace to the run folder; returns its relative path."""
        folder = Path(run_dir) / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{socket.gethostname()}_{os.getpid()}_rank{rank}.{time.time_ns()}.pt.trace.json.gz"
        with PROFILERS.ours():
            self._profiler.export_chrome_trace(str(folder / name))
        (folder / name).chmod(0o600)
        return f"{FOLDER}/{name}"

    def _close(self) -> None:
        self._mark.__exit__(None, None, None)


def warm_up() -> None:
    """The first recording takes long to set up on a device: do it in the step before."""
    profiler = _new_profiler()
    with PROFILERS.ours(), _silence():
        profiler.start()
        profiler.stop()


def _runnable_ns() -> int:
    """Sum over all threads, from /proc; 0 if not available."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may exit meanwhile.
        with suppress(OSError, ValueError, IndexError):
            total += int(thread.read_text().split()[1])
    return total


def _new_profiler(**options: Any) -> Any:
    """Without the schedule of torch.profiler.profile, which warns about steps that it did not schedule."""
    return torch_compat.lookup(torch_compat.KINETO)(**options)


def _mark(step: int) -> Any:
    # The profiler itself uses this name for steps, and trace readers know it.
    mark: Any = record_function(f"ProfilerStep#{step}")
    mark.__enter__()
    return mark


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps the job's output unchanged; a level that the user has set stays in effect."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)

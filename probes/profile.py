"""Records the steps of the window with torch.profiler, and when each gradient was ready in them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from ddpcheck import torch_compat
from ddpcheck.patches import Patches
from ddpcheck.probes.probe import Phase, Probe, ProbeContext
from ddpcheck.probes.process.profiler_conflict import PROFILERS
from ddpcheck.records.schema import ReadyRecord, TraceRecord
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.config import Config


FOLDER = "traces"
# Kineto tells of every start and stop on stderr. It reads its level once, when the first profiler is made.
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class ProfilerSession:
    """Under way from the moment it is made; nothing of it lies inside a span of ours, which could not end in time."""

    # For how long threads of this rank could have run and had no processor: on a machine that is too busy, what
    # looks like a slow link is this.
    held_up_ns = 0

    def __init__(self, step: int) -> None:
        self.first = step
        self.end = step
        # Shapes tell the sizes of what gloo reduces.
        self._profiler = _new_profiler(record_shapes=True)
        with PROFILERS.ours(), _silence():
            self._profiler.start()
        PROFILERS.recording = True
        self._held_up = _held_up_ns()
        self._mark = _mark(step)

    def next(self, step: int) -> None:
        """One step is over and the next begins."""
        self._close()
        self.end = step
        self._mark = _mark(step)

    def stop(self) -> None:
        """The last step is over."""
        self._close()
        self.held_up_ns = max(0, _held_up_ns() - self._held_up)
        PROFILERS.recording = False
        with PROFILERS.ours(), _silence():
            self._profiler.stop()

    def write(self, run_dir: str, rank: int) -> str:
        """The trace as a file of the run folder; its name in there."""
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
    """What a first recording has to set up takes long on a device: better in the step before."""
    profiler = _new_profiler()
    with PROFILERS.ours(), _silence():
        profiler.start()
        profiler.stop()


def _held_up_ns() -> int:
    """Over all threads, as Linux counts it; 0 where it does not."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        # Threads come and go.
        with suppress(OSError, ValueError, IndexError):
            total += int(thread.read_text().split()[1])
    return total


def _new_profiler(**options: Any) -> Any:
    """The part of torch.profiler without a schedule, which warns about schedules that it did not make."""
    return torch_compat.lookup(torch_compat.KINETO)(**options)


def _mark(step: int) -> Any:
    # By this name the profiler itself marks steps, and its readers know them.
    mark: Any = record_function(f"ProfilerStep#{step}")
    mark.__enter__()
    return mark


@contextmanager
def _silence() -> Iterator[None]:
    """The job's own output stays as it is; where the user has chosen a level, it holds."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


# A script may profile by itself at every step: what it exports is noted so many times.
MOST_EXPORTS = 100


class ProfileProbe(Probe):
    """Steps begin where the last one ended, at the end of the optimizer's step; the first one with its forward."""

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
        # By module, the moments at which gradients of the backward under way were ready.
        self._ready: dict[int, list[tuple[int, int]]] = {}
        self._exports = 0
        if steps:
            self._patches = Patches()
            PROFILERS.watch_exports(self._patches)
            PROFILERS.on_conflict, PROFILERS.on_export = self._step_aside, self._exported

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._step < 0:
            self._enter(tracked.steps)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        self._enter(optimizer.steps + 1)

    def _enter(self, step: int) -> None:
        """A step begins. Where several optimizers share it, the first of them to step begins the next."""
        if step <= self._step or self._end == 0:
            return
        self._step = step
        if self._recording is not None:
            self._go_on(step)
        elif self._first - 1 <= step < (self._end or 0) and not self._taken():
            if step < self._first:
                warm_up()
            else:
                self._recording = ProfilerSession(step)

    def _go_on(self, step: int) -> None:
        if self._recording is not None and step < (self._end or 0):
            self._recording.next(step)
        else:
            self._finish(step)

    def _finish(self, end: int) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        # A step that was cut off would pass for a short one, but it lies under its own mark: readers leave it out.
        if end > recording.first:
            file = recording.write(self.context.config.run_dir, self.context.rank)
            self.context.write(
                TraceRecord(file=file, first=recording.first, end=end, held_up_ns=recording.held_up_ns)
            )
        self._end = 0

    def _taken(self) -> bool:
        """Whether the user's program profiles by itself."""
        enabled = torch_compat.lookup(torch_compat.AUTOGRAD_PROFILING)
        if not PROFILERS.user_profiles and not (enabled is not None and enabled()):
            return False
        self._step_aside()
        return True

    def _step_aside(self) -> None:
        """The user's profiler is about to be switched on, or is on: ours gives way for good."""
        if self._end == 0:
            return
        self._end = 0
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
        self.context.write(TraceRecord(file="", own=False))

    def _exported(self, path: str) -> None:
        self._exports += 1
        if self._exports <= MOST_EXPORTS:
            self.context.write(TraceRecord(file=path, own=False))

    def backward_begun(self, tracked: TrackedModule) -> None:
        if self._recording is not None:
            self._ready[tracked.index] = []

    def gradient_ready(self, tracked: TrackedModule, place: int, gradient: torch.Tensor) -> None:
        ready = self._ready.get(tracked.index)
        if ready is not None:
            ready.append((place, time.time_ns()))

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        done = time.time_ns()
        ready = self._ready.pop(tracked.index, None)
        if not ready or self._recording is None or tracked.backward is None:
            return
        begin = ready[0][1]
        self.context.write(
            ReadyRecord(
                module=tracked.index,
                number=tracked.backward.number,
                step=self._step,
                begin_ns=begin,
                order=[place for place, _ in ready],
                after_us=[(at - begin) // 1000 for _, at in ready],
                done_us=(done - begin) // 1000,
                limits=_limits(tracked.ddp()),
            )
        )

    def before_exit(self) -> None:
        """The job is over before the window is: the steps that are whole are kept."""
        self._finish(self._step)
        if PROFILERS.on_conflict == self._step_aside:
            PROFILERS.on_conflict = PROFILERS.on_export = None


def _limits(ddp: Any) -> list[int]:
    """Sizes in bytes at which DDP closes its buckets, the first one's first; the last holds for all that follow."""
    listed = getattr(ddp, "bucket_bytes_cap_list", None)
    if listed:
        return [int(size) for size in listed]
    cap = int(getattr(ddp, "bucket_bytes_cap", 0))
    if getattr(ddp, "bucket_bytes_cap_default", False):
        first = torch_compat.lookup(torch_compat.FIRST_BUCKET)
        return [int(first), cap] if first is not None else []
    return [cap]

"""One recording of torch.profiler: whole steps, each under its mark, written where torch-tb-profiler looks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function
from torch.profiler.profiler import _KinetoProfile

from ddpcheck.probes.process.profiler_conflict import PROFILERS

FOLDER = "traces"
# Kineto tells of every start and stop on stderr. It reads its level once, when the first profiler is made.
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class Recording:
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
    return _KinetoProfile(**options)


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

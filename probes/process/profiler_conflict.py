"""Whether anybody else profiles in this process: torch has one profiler only, and the user's goes first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ddpcheck.guard import GUARD
from ddpcheck.patches import Patches, calling

# Every way to switch torch's profiler on, by module and class. A profiler that is prepared and not yet switched
# on counts too: torch crashes where another one comes in between.
_SWITCHES = (
    ("torch.autograd.profiler", "profile", ("_prepare_trace", "_start_trace")),
    ("torch.autograd.profiler", "emit_nvtx", ("__enter__",)),
    ("torch.autograd.profiler", "emit_itt", ("__enter__",)),
    ("torch.autograd.profiler_legacy", "profile", ("_start_trace",)),
)


class ProfilerConflict:
    """Told of every profiler that is switched on, and of every trace that is exported; ours do not count."""

    def __init__(self) -> None:
        # Whether the user's program has profiled, or is about to.
        self.of_the_user = False
        self.step_aside: Callable[[], object] | None = None
        self.exported: Callable[[str], object] | None = None
        # Whether a recording of ours is under way.
        self.recording = False
        self._ours = 0

    def watch_switches(self, patches: Patches) -> None:
        """As early as torch is there: the user's program may profile before it makes a process group."""
        told = GUARD.protect("profile", "switched_on", self._switched_on)
        for name, kind, methods in _SWITCHES:
            owner = getattr(sys.modules.get(name), kind, None)
            for method in methods if owner is not None else ():
                patches.replace(owner, method, lambda original: calling(original, told, None))

    def watch_exports(self, patches: Patches) -> None:
        """Once torch is imported as a whole."""
        from torch.profiler import profiler

        told = GUARD.protect("profile", "exported", self._exported)
        patches.replace(
            profiler._KinetoProfile, "export_chrome_trace", lambda original: calling(original, None, told)
        )

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What is switched on or exported in here is our own."""
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1

    def forked(self) -> None:
        """A child of this process, most often a data-loader worker, would go on recording until it is gone."""
        if not self.recording:
            return
        self.recording = False
        autograd: Any = sys.modules["torch"]._C._autograd
        # Stopping it would ask for threads that a fork leaves behind; nothing to record is enough.
        autograd._enable_record_function(False)

    def _switched_on(self, *args: Any, **kwargs: Any) -> None:
        if self._ours:
            return
        self.of_the_user = True
        if self.step_aside is not None:
            self.step_aside()

    def _exported(self, profiler: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if not self._ours and self.exported is not None:
            self.exported(os.path.abspath(os.fspath(path)))


PROFILERS = ProfilerConflict()

"""Detects other profilers in this process: torch supports one at a time, and the user's has priority."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ddpcheck import torch_compat
from ddpcheck.guard import GUARD
from ddpcheck.patches import Patches, calling

# Every entry point that starts the profiler of torch, by module and class. A profiler that is prepared and not yet
# started counts too: torch crashes if another one starts in between.
_SWITCHES = (
    torch_compat.PREPARE_TRACE,
    torch_compat.START_TRACE,
    torch_compat.START_LEGACY_TRACE,
)
_CONTEXTS = ("emit_nvtx", "emit_itt")


class ProfilerConflict:
    """Notified of every profiler that starts and of every trace that is exported, except our own."""

    def __init__(self) -> None:
        # Whether the user's program has profiled, or is about to.
        self.user_profiles = False
        self.on_conflict: Callable[[], object] | None = None
        self.on_export: Callable[[str], object] | None = None
        # Whether our own session is recording.
        self.recording = False
        self._ours = 0

    def watch_switches(self, patches: Patches) -> None:
        """Call as soon as torch is imported: the user's program may profile before it makes a process group."""
        guarded = GUARD.protect("profile", "switched_on", self._switched_on)
        for private in _SWITCHES:
            torch_compat.patch(patches, private, lambda original: calling(original, guarded, None))
        for name in _CONTEXTS:
            context = getattr(sys.modules.get("torch.autograd.profiler"), name, None)
            if context is not None:
                patches.replace(context, "__enter__", lambda original: calling(original, guarded, None))

    def watch_exports(self, patches: Patches) -> None:
        """Call once torch is imported completely."""
        import torch.profiler  # noqa: F401

        guarded = GUARD.protect("profile", "exported", self._exported)
        owner = torch_compat.lookup(torch_compat.KINETO)
        if owner is not None:
            patches.replace(owner, "export_chrome_trace", lambda original: calling(original, None, guarded))

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Profilers started and traces exported inside this context are our own."""
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1

    def forked(self) -> None:
        """Stops recording in a forked child, usually a data loader worker, which would record until it exits."""
        if not self.recording:
            return
        self.recording = False
        enable = torch_compat.lookup(torch_compat.RECORD_FUNCTION)
        # Stopping the profiler would need threads that do not survive a fork; disabling its callbacks is enough.
        if enable is not None:
            enable(False)

    def _switched_on(self, *args: Any, **kwargs: Any) -> None:
        if self._ours:
            return
        self.user_profiles = True
        if self.on_conflict is not None:
            self.on_conflict()

    def _exported(self, profiler: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if not self._ours and self.on_export is not None:
            self.on_export(os.path.abspath(os.fspath(path)))


PROFILERS = ProfilerConflict()

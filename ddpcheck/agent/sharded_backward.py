"""What is known of the backwards of shards: FSDP reduces their gradients without hooks of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpcheck.agent.backward_tracker import BackwardState, BackwardTracker, BackwardWindow
from ddpcheck.records.reasons import UnsyncedReason, UnwrappedReason

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.tracked_module import TrackedModule

_NO_EVENT: Any = lambda *args: None  # noqa: E731


class ShardedBackward(BackwardTracker):
    """FSDP reduces gradients without hooks of parameters: only the gradients that an optimizer applies are seen."""

    def __init__(self, tracked: TrackedModule) -> None:
        super().__init__(tracked, _NO_EVENT)
        self.window = BackwardWindow(synced=1, last=BackwardState.SYNCED)

    def close_window(self) -> None:
        """Every step has the same window."""


class FlatBackward(ShardedBackward):
    """Of FSDP1: whether it has reduced gradients since the last step. Inside `no_sync()` it does not."""

    def __init__(self, tracked: TrackedModule, reductions: Callable[[], int]) -> None:
        super().__init__(tracked)
        self._shards = tracked
        self._reductions = reductions
        self._before = (0, 0)

    def drain(self) -> None:
        """Called before each step."""
        now = self._reductions(), self._shards.forwards
        reduced, called = (new > old for new, old in zip(now, self._before, strict=True))
        self._before = now
        self.window = (
            BackwardWindow(unsynced=1, last=BackwardState.UNSYNCED, reason=UnsyncedReason.NO_SYNC)
            if called and not reduced
            else BackwardWindow(synced=1, last=BackwardState.SYNCED)
        )


class PartialBackward(ShardedBackward):
    """Of shards on a part of the mesh: whether their gradients come with those of the shards on the whole mesh."""

    def __init__(self, tracked: TrackedModule, wide: torch.Tensor) -> None:
        super().__init__(tracked)
        self.window = BackwardWindow(unsynced=1, last=BackwardState.UNSYNCED)
        self._shards = tracked
        self._wide = weakref.ref(wide)
        self._calls = 0

    def drain(self) -> None:
        """Called before each step. With one call of `backward` since the last one, all gradients come from it."""
        calls, self._calls = self._shards.forwards - self._calls, self._shards.forwards
        wide = self._wide()
        together = calls == 1 and wide is not None and wide.grad is not None
        self.window.reason = UnwrappedReason.SHARED_BACKWARD if together else UnwrappedReason.OWN_BACKWARD

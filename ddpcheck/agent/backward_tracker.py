"""Tracks the backwards of a module: which ones DDP reduced, which ones it did not, and why."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck import torch_compat
from ddpcheck.guard import GUARD
from ddpcheck.patches import hide_from_compiler
from ddpcheck.probes.probe import Emit, Probe
from ddpcheck.records.reasons import UnsyncedReason

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule


_is_function_apply = torch_compat.frame_test(torch_compat.FUNCTION_APPLY)


class BackwardState(str, Enum):
    """The outcome of the last backward before a step."""

    NONE = "none"
    SYNCED = "synced"
    UNSYNCED = "unsynced"
    UNFINISHED = "unfinished"


@dataclass
class BackwardWindow:
    """Forwards and backwards of a module since its last step."""

    armed: int = 0
    unarmed: int = 0
    synced: int = 0
    unsynced: int = 0
    last: BackwardState = BackwardState.NONE
    reason: UnsyncedReason | None = None
    # Indices of parameters that got no gradient in a backward that DDP waited to reduce.
    waiting: tuple[int, ...] = ()
    closed: bool = False


class BackwardTracker:
    """Hooks that run when a gradient has been accumulated, before DDP's reducer copies it into a bucket.

    DDP prepares its reducer in a forward with gradients outside no_sync, and the reducer finishes when all buckets are
    reduced. DDP queues its end-of-backward callback during the backward. A callback that is queued from inside another
    callback runs after it, so it reads reduced gradients.
    """

    def __init__(self, tracked: TrackedModule, emit: Emit) -> None:
        self.window = BackwardWindow()
        self.number = 0
        self._tracked = tracked
        self._emit = emit
        self._armed = False
        self._synced = False
        self._tasks: set[int] = set()
        self._nested: set[int] = set()
        self._fired: set[int] = set()
        # Indices of the parameters that the reducer was built with.
        self.reducer_indices: set[int] = set()
        self._handles: list[Any] = []
        self._ready = hide_from_compiler(GUARD.protect("backward", "ready", self._on_ready))
        self._first = hide_from_compiler(GUARD.protect("backward", "queued", self._on_first))
        self._second = hide_from_compiler(GUARD.protect("backward", "done", self._on_done))

    @property
    def finds_unused(self) -> bool:
        """Whether DDP also finishes a backward that does not use all parameters."""
        ddp: Any = self._tracked.ddp()
        return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))

    def attach(self) -> None:
        """Hook every parameter of the reducer. The hooks hold only weak references to objects of the program."""
        if torch_compat.lookup(torch_compat.ENGINE) is None:
            return
        tracker_ref = weakref.ref(self)
        for index, tensor in enumerate(self._tracked.tensors(self._tracked.parameters)):
            if not tensor.requires_grad:
                continue
            self.reducer_indices.add(index)

            def hook(parameter: torch.Tensor, index: int = index) -> None:
                tracker = tracker_ref()
                if tracker is not None:
                    tracker._ready(parameter, index)

            register: Any = tensor.register_post_accumulate_grad_hook
            self._handles.append(register(hook))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(self, armed: bool) -> None:
        """Called at a training forward through the wrapper. `armed`: it runs outside no_sync."""
        self.drain()
        self._open_window()
        self._tasks.clear()
        self._nested.clear()
        if armed:
            self.window.armed += 1
            self._armed = True
            self._move_hooks_last()
        else:
            self.window.unarmed += 1

    def _move_hooks_last(self) -> None:
        """Move our hooks behind hooks that the program registered later, since those may change the gradient."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks is None or len(hooks) == 1 or handle.id not in hooks:
                continue
            if next(reversed(hooks)) != handle.id:
                # Removed and inserted again: torch uses the order of insertion, which `move_to_end` does not change.
                hooks[handle.id] = hooks.pop(handle.id)

    def drain(self) -> None:
        """Called when the current backward has ended: records whether its reduction finished."""
        if not self._synced:
            return
        self._synced = False
        waiting = self._waiting()
        if waiting:
            self.window.last = BackwardState.UNFINISHED
            self.window.waiting = waiting
        else:
            # Only nested backwards produced gradients, and their end is not the end of the reduction.
            self._reduced()

    def last_outcome(self) -> str:
        """The outcome of the last backward, or the reason why it was not reduced."""
        reason = self.window.reason if self.window.last is BackwardState.UNSYNCED else None
        return self.window.last.value if reason is None else reason.value

    def close_window(self) -> None:
        """Called after a step: later forwards and backwards belong to the next step."""
        self.window.closed = True

    def _open_window(self) -> None:
        if self.window.closed:
            self.window = BackwardWindow()

    def _on_ready(self, parameter: torch.Tensor, index: int) -> None:
        task = _graph_task()
        if task not in self._tasks:
            self._begin(task)
        self._fired.add(index)
        if self._synced and parameter.grad is not None:
            self._emit(Probe.gradient_ready, self._tracked, index, parameter.grad)

    def _begin(self, task: int) -> None:
        """Called at the first gradient of a backward, or of a nested backward inside a checkpoint."""
        self._open_window()
        self._tasks.add(task)
        if _is_nested():
            self._nested.add(task)
        if not self._synced:
            self._fired.clear()
            self._synced = self._armed
            if self._synced:
                self.number += 1
                self._emit(Probe.backward_begun, self._tracked)
            else:
                self._emit(Probe.unsynced_backward_begun, self._tracked)
                self._tracked.commit()
                # If the probes detected a manual update, this backward is the first of the next step.
                self._open_window()
        _queue(lambda: self._first(task))

    def _on_first(self, task: int) -> None:
        if self._synced and task not in self._nested:
            self._emit(Probe.gradients_computed, self._tracked)
        _queue(lambda: self._second(task))

    def _on_done(self, task: int) -> None:
        self._tasks.discard(task)
        window = self.window
        if not self._synced:
            window.unsynced += 1
            window.last = BackwardState.UNSYNCED
            window.reason = self._why_unsynced()
        elif task not in self._nested and not self._waiting():
            self._synced = False
            self._reduced()
            self._emit(Probe.gradients_reduced, self._tracked)

    def _reduced(self) -> None:
        self._armed = False
        self.window.synced += 1
        self.window.last = BackwardState.SYNCED

    def _waiting(self) -> tuple[int, ...]:
        """Indices of parameters that the reducer still waits for; empty if it detects unused parameters."""
        return () if self.finds_unused else tuple(sorted(self.reducer_indices - self._fired))

    def _why_unsynced(self) -> UnsyncedReason:
        window = self.window
        if not getattr(self._tracked.ddp(), "require_backward_grad_sync", True):
            return UnsyncedReason.NO_SYNC
        if window.unarmed and not window.armed:
            return UnsyncedReason.FORWARD_IN_NO_SYNC
        if not window.armed:
            return UnsyncedReason.BYPASS
        return UnsyncedReason.TWO_FORWARDS if window.armed > 1 else UnsyncedReason.SECOND_BACKWARD


def _queue(callback: Callable[[], object]) -> None:
    torch_compat.lookup(torch_compat.ENGINE).queue_callback(callback)


def _is_nested() -> bool:
    """Whether this backward runs inside another one, as in reentrant checkpointing.

    The inner backward ends before DDP has finished.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_function_apply(frame):
            return True
        frame = frame.f_back
    return False


def _graph_task() -> int:
    """The id of the running backward; 0 for all backwards if torch does not provide it."""
    current = _graph_task_id
    return int(current()) if current is not None else 0


_graph_task_id = torch_compat.lookup(torch_compat.GRAPH_TASK)

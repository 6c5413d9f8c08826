"""Tracks the backwards of a module: which ones DDP reduced, which ones it did not, and why."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from time import time_ns
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck import torch_compat
from ddpcheck.patches import hidden_entry
from ddpcheck.probes.probe import Emit, Probe
from ddpcheck.records.reasons import UnsyncedReason, UnwrappedReason

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule


# No backward has a negative id.
NO_TASK = -2
# Gradients that hooks hold are read at this size, which is that of a bucket.
MAX_HELD_BYTES = 25 << 20

_function_applies = torch_compat.frames_of(torch_compat.FUNCTION_APPLY)


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
    reason: UnsyncedReason | UnwrappedReason | None = None
    # Parameters that got no gradient in a backward that DDP waited to reduce, by their positions at wrapping.
    waiting: tuple[int, ...] = ()
    closed: bool = False


class HookKind(Enum):
    """How a parameter's hook reports its gradient."""

    # Appends the parameter's index to a list: a third of a microsecond.
    LIST = 0
    # Calls the tracker, which reads the clock or the gradient at once. Hidden from compilers.
    CALL = 1


class BackwardTracker:
    """Hooks that run when a gradient has been accumulated, before DDP's reducer copies it into a bucket.

    DDP prepares its reducer in a forward with gradients outside no_sync, and the reducer finishes when all buckets are
    reduced. DDP queues its end-of-backward callback when its last bucket is ready, after our first hook has queued one.
    So our callback runs before it and reads all local gradients together. A callback that is queued from inside
    another callback runs after it and reads reduced ones.

    With `gradient_as_bucket_view`, DDP replaces or divides each gradient directly after our hook. The hook holds such
    gradients until there are enough to read; those that DDP divides in place are read by the hook itself.
    """

    def __init__(self, tracked: TrackedModule, emit: Emit) -> None:
        self.window = BackwardWindow()
        self.number = 0
        # If set before a forward: when each gradient was ready, as pairs of index and nanoseconds since 1970.
        self.time_gradients = False
        # Set when a backward begins whose local gradients are not read.
        self.skips_gradients = False
        self.ready_times: list[tuple[int, int]] = []
        self._tracked = tracked
        self._emit = emit
        self._armed = False
        # Whether the latest forward ran inside no_sync.
        self._last_unarmed = False
        self._synced = False
        self._tasks: set[int] = set()
        self._nested: set[int] = set()
        # The id of the backward that the last hook ran in. A list, since hooks share it.
        self._current_task = [NO_TASK]
        # Indices of the parameters whose gradients were accumulated, in order, and how many of these were read.
        self._fired: list[int] = []
        self._read = 0
        # Whether hooks hold the gradients, which ones they hold now, and at how many bytes those are read.
        self._holds = False
        self._held: list[tuple[int, torch.Tensor | None]] = []
        self._held_bytes = 0
        self._max_held_bytes = 0
        # Hooks report a parameter by its position when the module was wrapped: later, it may have another place in the
        # module's list. The positions of the parameters that the reducer was built with, and of those with sparse
        # gradients: DDP divides such a gradient in place, directly after our hook.
        self._reducer_positions: set[int] = set()
        self._divided_in_place: set[int] = set()
        # Ids of all parameters in the order of the wrapping, and the current index of each; None: unchanged.
        self._identities: list[int] = []
        self._indices: list[int] | None = None
        self._revision = 0
        # Whether backwards of this module have been nested in others.
        self._has_nested = False
        self._handles: list[Any] = []
        # The hooks of each parameter as torch keeps them, the key of ours, and our hooks by kind.
        self._hooks: list[tuple[dict[int, Any], int, dict[HookKind, Callable[..., None]]]] = []
        self._hook_dicts: list[dict[int, Any]] = []
        self._hook_kind = HookKind.LIST
        # Of torch's engine: calls a function at the end of the backward.
        self._queue: Callable[[Callable[[], object]], None] = _ignore
        self._ready = _entry("ready", self._on_ready)
        self._task_begun = _entry("begun", self._on_task)
        self._first = _entry("queued", self._on_first)
        self._second = _entry("done", self._on_done)

    @property
    def program_has_hooks(self) -> bool:
        """Whether the program registered hooks of the same kind, which may write to accumulated gradients."""
        return max(map(len, self._hook_dicts), default=1) > 1

    @property
    def last_task(self) -> int:
        """The id of the backward that last reached the module."""
        return self._current_task[0]

    @property
    def finds_unused(self) -> bool:
        """Whether DDP also finishes a backward that does not use all parameters."""
        ddp: Any = self._tracked.ddp()
        return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))

    @property
    def all_used(self) -> bool:
        """Whether this backward has computed a gradient of every parameter that the reducer was built with."""
        return not self._reducer_positions.difference(self._fired)

    @property
    def holds(self) -> bool:
        """Whether local gradients are read in parts. Otherwise those of all parameters are read together."""
        return self._holds or self._has_nested

    @property
    def reducer_indices(self) -> set[int]:
        """The current indices of the parameters that the reducer was built with."""
        return set(self._current(sorted(self._reducer_positions)))

    def _current(self, positions: Iterable[int]) -> list[int]:
        """The current indices of parameters by their positions at wrapping, without those that were removed."""
        if self._revision != self._tracked.revision:
            self._revision = self._tracked.revision
            now = {id(tensor): index for index, tensor in enumerate(self._tracked.parameter_tensors())}
            indices = [now.get(identity, -1) for identity in self._identities]
            self._indices = indices if indices != list(range(len(indices))) else None
        if self._indices is None:
            return list(positions)
        indices = self._indices
        return [indices[position] for position in positions if indices[position] >= 0]

    def attach(self) -> None:
        """Hook every parameter of the reducer. The hooks hold only weak references to objects of the program."""
        engine = torch_compat.lookup(torch_compat.ENGINE)
        if engine is None:
            return
        self._queue = engine.queue_callback
        sparse = self._tracked.sparse_parameters()
        self._revision = self._tracked.revision
        for index, tensor in enumerate(self._tracked.tensors(self._tracked.parameters)):
            self._identities.append(id(tensor))
            if not tensor.requires_grad:
                continue
            self._reducer_positions.add(index)
            hooks = self._make_hooks(index)
            if index in sparse:
                self._divided_in_place.add(index)
                hooks[HookKind.LIST] = hooks[HookKind.CALL]
            register: Any = tensor.register_post_accumulate_grad_hook
            handle = register(hooks[self._hook_kind])
            self._handles.append(handle)
            self._hook_dicts.append(handle.hooks_dict_ref())
            self._hooks.append((self._hook_dicts[-1], handle.id, hooks))

    def _make_hooks(self, index: int) -> dict[HookKind, Callable[..., None]]:
        tracker_ref = weakref.ref(self)
        current_task, append = self._current_task, self._fired.append

        def begun() -> bool:
            tracker = tracker_ref()
            # None if the guard has switched the tracker off.
            return tracker is not None and tracker._task_begun() is True

        def list_hook(parameter: torch.Tensor) -> None:
            if _graph_task() == current_task[0] or begun():
                append(index)

        def call_hook(parameter: torch.Tensor) -> None:
            tracker = tracker_ref()
            if tracker is not None:
                tracker._ready(parameter, index)

        return {HookKind.LIST: list_hook, HookKind.CALL: call_hook}

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._hook_dicts.clear()
        self._clear()

    def backward_called(self) -> None:
        """Called when the program calls `backward`. A compiled backward traces hooks unless they are hidden from it."""
        if self._hook_kind is not HookKind.CALL and torch_compat.compiles_autograd():
            self._set_hook_kind(HookKind.CALL)

    def forward(self, armed: bool) -> None:
        """Called at a training forward through the wrapper. `armed`: it runs outside no_sync."""
        if self._synced:
            self.drain()
        self._open_window()
        self._tasks.clear()
        self._nested.clear()
        self._clear()
        self._last_unarmed = not armed
        if armed:
            self.window.armed += 1
            self._armed = True
            self._order_hooks()
        else:
            self.window.unarmed += 1
        self._holds = self._must_hold()
        calls = (
            self._holds
            or self.time_gradients
            or _graph_task_id is None
            or torch_compat.may_compile_autograd()
        )
        self._set_hook_kind(HookKind.CALL if calls else HookKind.LIST)

    def _must_hold(self) -> bool:
        """Whether gradients may change between their hook and the end of the backward."""
        ddp: Any = self._tracked.ddp()
        if self._tracked.comm_hook_may_write or self._reduces_early(ddp):
            self._max_held_bytes = 0
            return True
        if not getattr(ddp, "gradient_as_bucket_view", False):
            return False
        # A gradient from before this backward is part of its bucket: DDP divides it in place.
        # Not `count(None)`, which compares tensors.
        old = any(gradient is not None for gradient in self._tracked.gradients())
        self._max_held_bytes = 0 if old else MAX_HELD_BYTES
        return True

    def _reduces_early(self, ddp: Any) -> bool:
        """Whether DDP reduces gradients before the callbacks of this backward run."""
        if torch_compat.read(torch_compat.PYTHON_REDUCER, ddp, False):
            return True
        # The first backward of a static graph is reduced by a callback that DDP queues before ours. An optimizer in the
        # backward steps in a communication hook that DDP registers in the first forward.
        return self.number == 0 and (
            bool(getattr(ddp, "static_graph", False))
            or any(
                torch_compat.read(torch_compat.IN_BACKWARD, parameter) is not None
                for parameter in self._tracked.parameter_tensors()
            )
        )

    def _set_hook_kind(self, kind: HookKind) -> None:
        if kind is not self._hook_kind:
            self._hook_kind = kind
            for hooks, key, ours in self._hooks:
                if key in hooks:
                    hooks[key] = ours[kind]

    def _order_hooks(self) -> None:
        """Move our hooks behind hooks that the program registered later, since those may change the gradient.

        A reducer in Python reduces in such a hook itself: there ours come first.
        """
        if not self.program_has_hooks:
            return
        if torch_compat.read(torch_compat.PYTHON_REDUCER, self._tracked.ddp(), False):
            for hooks, key, _ in self._hooks:
                if key in hooks and next(iter(hooks)) != key:
                    ours, others = hooks.pop(key), dict(hooks)
                    hooks.clear()
                    hooks[key] = ours
                    hooks.update(others)
            return
        for hooks, key, _ in self._hooks:
            if len(hooks) > 1 and key in hooks and next(reversed(hooks)) != key:
                # Removed and inserted again: torch uses the order of insertion, which `move_to_end` does not change.
                hooks[key] = hooks.pop(key)

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

    def before_step(self) -> None:
        """Called before a step. Inside a backward, gradients are not reduced yet, unless DDP itself lets it step."""
        if not (self._armed and _inside_backward() and self._reducer_positions.difference(self._fired)):
            self.drain()
        elif not any(
            torch_compat.read(torch_compat.IN_BACKWARD, parameter) is not None
            for parameter in self._tracked.parameter_tensors()
        ):
            # The backward goes on, and its reduction is still to come.
            self._open_window()
            self.window.last, self.window.reason = BackwardState.UNSYNCED, UnsyncedReason.IN_BACKWARD
        else:
            self.drain()

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
        if task != self._current_task[0]:
            self._on_task()
        self._fired.append(index)
        if not self._synced:
            return
        if self.time_gradients:
            self.ready_times.append((index, time_ns()))
        if self.skips_gradients:
            return
        if self._holds:
            self._held.append((index, parameter.grad))
            # A sparse gradient has no size of its own.
            self._held_bytes += parameter.nbytes
            if self._held_bytes > self._max_held_bytes:
                self._emit_held()
        elif index in self._divided_in_place:
            self._emit(Probe.gradients_ready, self._tracked, self._current([index]), [parameter.grad])

    def _on_task(self) -> bool:
        """Called at the first gradient of a backward, or when a nested backward inside a checkpoint begins or ends."""
        task = _graph_task()
        if task not in self._tasks:
            self._begin(task)
        # Without ids, every hook asks whether the backward is new.
        self._current_task[0] = task if _graph_task_id is not None else NO_TASK
        return True

    def _begin(self, task: int) -> None:
        self._open_window()
        self._tasks.add(task)
        if _is_nested():
            self._nested.add(task)
            self._has_nested = True
        if not self._synced:
            self._clear()
            self._synced = self._armed
            if self._synced:
                self.number += 1
                self.skips_gradients = False
                self._emit(Probe.backward_begun, self._tracked)
            else:
                self._emit(Probe.unsynced_backward_begun, self._tracked)
                self._tracked.commit()
                # If the probes detected a manual update, this backward is the first of the next step.
                self._open_window()
        self._queue(lambda: self._first(task))

    def _emit_held(self) -> None:
        """Hand the gradients that hooks hold to the probes."""
        held, self._held, self._held_bytes = dict(self._held), [], 0
        if held:
            gradients = dict(zip(self._current(held), held.values(), strict=True))
            indices = sorted(gradients)
            self._emit(Probe.gradients_ready, self._tracked, indices, [gradients[index] for index in indices])

    def _emit_local(self) -> None:
        """Hand the local gradients to the probes that hooks did not hold."""
        fired, self._read = self._fired[self._read :], len(self._fired)
        gradients = self._tracked.gradients()
        if not self._nested and not self._divided_in_place:
            # Also those of unused parameters: DDP reduces what they had before.
            self._emit(Probe.gradients_ready, self._tracked, range(len(gradients)), gradients)
            return
        # DDP may finish in a nested backward: then what was computed before it is reduced by now.
        wanted = set(self._current(fired)) if self._nested else set(range(len(gradients)))
        indices = sorted(wanted.difference(self._current(self._divided_in_place)))
        if indices:
            self._emit(Probe.gradients_ready, self._tracked, indices, [gradients[index] for index in indices])

    def _on_first(self, task: int) -> None:
        if self._synced:
            if self._held:
                self._emit_held()
            if not (self._holds or self.skips_gradients):
                self._emit_local()
            if task not in self._nested:
                self._emit(Probe.gradients_computed, self._tracked)
        elif task not in self._nested:
            self._emit(Probe.unsynced_gradients_ready, self._tracked)
        self._queue(lambda: self._second(task))

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
        # Another backward before the next forward adds to these gradients, which are in the buckets now.
        self._max_held_bytes = 0

    def fired_order(self) -> list[int]:
        """Indices of the parameters with a gradient of this backward, in the order in which it was accumulated."""
        return list(dict.fromkeys(self._current(self._fired)))

    def _clear(self) -> None:
        # The hooks share this list.
        self._fired.clear()
        self._read = 0
        self._held, self._held_bytes = [], 0
        self.ready_times = []

    def _reduced(self) -> None:
        self._armed = False
        self.window.synced += 1
        self.window.last = BackwardState.SYNCED

    def _waiting(self) -> tuple[int, ...]:
        """Positions of parameters that the reducer still waits for; empty if it detects unused parameters."""
        if self.finds_unused:
            return ()
        waiting = self._reducer_positions.difference(self._fired)
        return tuple(sorted(waiting)) if waiting else ()

    def _why_unsynced(self) -> UnsyncedReason | UnwrappedReason:
        window, by_context = self.window, self._tracked.uses_no_sync
        if not getattr(self._tracked.ddp(), "require_backward_grad_sync", True):
            return UnsyncedReason.NO_SYNC if by_context else UnsyncedReason.FLAG_OFF
        if window.unarmed and (not window.armed or self._last_unarmed):
            return UnsyncedReason.FORWARD_IN_NO_SYNC if by_context else UnsyncedReason.FLAG_SWITCHED
        if not window.armed:
            return UnsyncedReason.BYPASS
        return UnsyncedReason.TWO_FORWARDS if window.armed > 1 else UnsyncedReason.SECOND_BACKWARD


def _ignore(callback: Callable[[], object]) -> None:
    """Without hooks there is no backward to follow."""


def _entry(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    return hidden_entry("backward", name, body)


def _is_nested() -> bool:
    """Whether this backward runs inside another one, as in reentrant checkpointing.

    The inner backward ends before DDP has finished.
    """
    return _function_applies(sys._getframe(1), 1) > 0


# The id of the running backward; 0 for all backwards if torch does not provide it.
_graph_task_id = torch_compat.lookup(torch_compat.GRAPH_TASK)
# Called by every hook: without a function of ours in between.
_graph_task: Callable[[], int] = _graph_task_id if _graph_task_id is not None else lambda: 0


def _inside_backward() -> bool:
    """False where torch does not provide the id of the running backward."""
    return _graph_task_id is not None and _graph_task_id() >= 0

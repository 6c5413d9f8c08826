"""Reasons and points of a step that records hold as stable values; the analysis makes sentences from them.

Standard library only: this is imported inside ranks. Runs of earlier versions store sentences instead of the values of
some enums. `Enum(text)` accepts both.
"""

from __future__ import annotations

from enum import Enum


class WriteWindow(str, Enum):
    """The part of a step in which something other than the optimizer wrote to parameters (`DigestRecord.how`)."""

    BEFORE_FORWARD = "before_forward"
    IN_FORWARD = "in_forward"
    AFTER_BACKWARD = "after_backward"

    @classmethod
    def _missing_(cls, value: object) -> WriteWindow | None:
        return _STORED_WINDOWS.get(value)


# The probe in fault records of a rank that cannot open the memory shared with its launcher.
NO_EXCHANGE = "exchange"


class NoHangWatch(str, Enum):
    """Why hangs of ranks are not detected (`NoHangWatchRecord.why`)."""

    NO_MEMORY = "no_memory"  # there is no place for memory that ranks and launcher share
    HIDDEN = "hidden"  # the launcher cannot see the processes of the ranks


class UnsyncedReason(str, Enum):
    """Why DDP did not reduce a backward (`AppliedRecord.reason`, `DigestRecord.how` after a manual update)."""

    NO_SYNC = "no_sync"
    FORWARD_IN_NO_SYNC = "forward_in_no_sync"
    BYPASS = "wrapper_bypassed"
    TWO_FORWARDS = "two_forwards"
    SECOND_BACKWARD = "second_backward"
    # The step ran inside the backward.
    IN_BACKWARD = "in_backward"
    # The program sets `require_backward_grad_sync` itself: it is off, or was off in the forward.
    FLAG_OFF = "flag_off"
    FLAG_SWITCHED = "flag_switched"

    @classmethod
    def _missing_(cls, value: object) -> UnsyncedReason | None:
        return _STORED_REASONS.get(value)


class UnwrappedReason(str, Enum):
    """What is known of a backward of parameters outside of DDP (`AppliedRecord.reason`)."""

    # It also reaches a DDP module, or it does not.
    SHARED_BACKWARD = "shared_backward"
    OWN_BACKWARD = "own_backward"
    # It reaches a DDP module, but ranks exchange activations: each may train other experts, classes or shards.
    EXCHANGED = "exchanged"


class BufferState(str, Enum):
    """Why the buffers of a rank may differ when the job ends (`DigestRecord.how` at stage `buffers.end`)."""

    NOT_SYNCED = "not_synced"

    @classmethod
    def _missing_(cls, value: object) -> BufferState | None:
        return cls.NOT_SYNCED if value == "left alone" else None


# `FaultRecord.probe` of a rank whose device has no kernel.
KERNEL_PROBE = "device_kernel"


class KernelLoss(str, Enum):
    """Why tensors of a device are read by operators of torch instead of one kernel (`FaultRecord.entry`)."""

    NO_TRITON = "no_triton"
    NO_COMPILER = "no_compiler"
    NO_CACHE_FOLDER = "no_cache_folder"
    COMPILATION = "compilation_failed"
    WRONG_RESULT = "wrong_result"
    NO_KERNEL = "no_kernel"
    LAUNCH = "launch_failed"


class LastEvent(str, Enum):
    """The last event of a training thread (`StackRecord.moment`); "" before the first one."""

    BEFORE_WRAP = "entering"
    AFTER_WRAP = "wrapped"
    BEFORE_FORWARD = "forward"
    BUFFERS_SYNCED = "buffers_synced"
    BACKWARD_BEGUN = "backward_begun"
    GRADIENTS_REDUCED = "reduced"
    BEFORE_STEP = "before_step"
    AFTER_STEP = "after_step"


class Awaited(str, Enum):
    """What a training thread provably waits for (first element of `StackRecord.awaits`)."""

    # A collective of its own that it polls.
    WORK = "work"
    # A result of the device.
    DEVICE = "device"
    # Workers of a data loader.
    LOADER = "loader"


class AuditSkip(str, Enum):
    """Why a local gradient was not computed again (`GradientVote.reason`)."""

    COMPILED = "compiled"
    SCRIPTED = "scripted"
    MIXED_PRECISION = "mixed_precision"
    MODULE_HOOKS = "module_hooks"
    FUNCTION_MODES = "function_modes"
    TENSOR_TYPES = "tensor_types"
    COLLECTIVES = "collectives"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    SIZE = "size"
    SEVERAL_FORWARDS = "several_forwards"
    EARLIER_GRADIENTS = "earlier_gradients"
    OTHER_PATHS = "other_paths"
    WEIGHTED_BACKWARD = "weighted_backward"
    SEVERAL_BACKWARDS = "several_backwards"
    NO_BACKWARD = "no_backward"
    PARAMETERS_WRITTEN = "parameters_written"
    PARAMETERS_DIFFER = "parameters_differ"
    IGNORED_PARAMETERS = "ignored_parameters"
    # The file of the other rank was not there, or cannot be read.
    NOT_HANDED_OVER = "not_handed_over"
    UNREADABLE = "unreadable"
    RAISED = "raised"


_STORED_WINDOWS: dict[object, WriteWindow] = {
    "before the forward": WriteWindow.BEFORE_FORWARD,
    "inside the forward": WriteWindow.IN_FORWARD,
    "between backward and step": WriteWindow.AFTER_BACKWARD,
}

_STORED_REASONS: dict[object, UnsyncedReason] = {
    "no_sync open": UnsyncedReason.NO_SYNC,
    "forward inside no_sync, backward outside": UnsyncedReason.FORWARD_IN_NO_SYNC,
    "wrapper bypassed": UnsyncedReason.BYPASS,
    "two forwards before two backwards": UnsyncedReason.TWO_FORWARDS,
    "second backward on one forward": UnsyncedReason.SECOND_BACKWARD,
    "second backward on one forward, or on a forward around the wrapper": UnsyncedReason.SECOND_BACKWARD,
}


def is_stored_as(text: str, member: Enum) -> bool:
    """Whether the field of a record holds `member`, as its value or as the sentence of an earlier version."""
    try:
        return type(member)(text) is member
    except ValueError:
        return False


class Unwatched(str, Enum):
    """Why a process of the job that uses torch is not watched, as its launcher sees it."""

    ENVIRONMENT = "environment"
    OPTIONS = "options"
    # A container or another root: ddpcheck, or the run folder, does not exist in it.
    NOT_INSTALLED = "not_installed"
    NO_FOLDER = "no_folder"
    # The ranks run as a user who cannot write to the run folder.
    OTHER_USER = "other_user"
    # Programs that start processes elsewhere.
    CONTAINER = "container"
    REMOTE = "remote"

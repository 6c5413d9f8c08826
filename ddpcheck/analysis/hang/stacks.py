"""Classifies a rank's stack: which communication it waits in, if any, and which line of the user's code called it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Frame = Sequence[Any]  # [file, line, function]

_C10D = "/torch/distributed/"
_DDP = "/torch/nn/parallel/distributed.py"
_AUTOGRAD = "/torch/autograd/"
_BUFFERS = ("_sync_buffers", "_sync_module_buffers")
_WRAPPING = ("__init__", "_verify_param_shape_across_processes", "_sync_module_states", "_ddp_init_helper")
# Decorators of torch.distributed: not the function that the user called.
_DECORATORS = ("wrapper", "inner")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")
# A rank in a debugger waits for its user.
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/", "/pydevd", "/debugpy/", "/code.py", "/IPython/")


class WaitKind(str, Enum):
    """The part of the job that communicates."""

    WRAPPING = "wrapping"
    BUFFERS = "buffers"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"

    @property
    def of_training(self) -> bool:
        """Whether DDP itself communicates, within a step."""
        return self in (WaitKind.BUFFERS, WaitKind.FORWARD, WaitKind.BACKWARD)


@dataclass(frozen=True)
class Wait:
    """The communication that a rank waits in. `name` is for messages."""

    kind: WaitKind
    name: str


_DDP_WAITS = {
    WaitKind.WRAPPING: Wait(WaitKind.WRAPPING, "DDP's constructor"),
    WaitKind.BUFFERS: Wait(WaitKind.BUFFERS, "the broadcast of buffers in DDP's forward"),
    WaitKind.FORWARD: Wait(WaitKind.FORWARD, "DDP's forward"),
    WaitKind.BACKWARD: Wait(WaitKind.BACKWARD, "the AllReduce of a backward"),
}


def wait_of(frames: Sequence[Frame]) -> Wait | None:
    """The communication that the innermost calls belong to; None if they belong to none.

    A backward has the same stack whether it computes or communicates, so the stack alone does not show that it waits.
    """
    if not frames:
        return None
    if _AUTOGRAD in _file(frames[0]):
        return _DDP_WAITS[WaitKind.BACKWARD]
    chain = _communicating(frames)
    if not chain:
        return None
    kind = _kind_of_ddp(chain)
    if kind is not None:
        return _DDP_WAITS[kind]
    called = [str(frame[2]) for frame in chain if frame[2] not in _DECORATORS]
    return Wait(WaitKind.COLLECTIVE, called[-1] if called else "a collective")


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code, else the innermost outside torch."""
    for foreign in (_LIBRARIES, ("/torch/", "<frozen ")):
        for frame in frames:
            if not any(mark in _file(frame) for mark in foreign):
                return frame
    return None


def in_debugger(frames: Sequence[Frame]) -> bool:
    return any(mark in _file(frame) for frame in frames for mark in _DEBUGGERS)


def _communicating(frames: Sequence[Frame]) -> list[Frame]:
    """The innermost calls, up to the first outside torch.distributed and DDP."""
    chain: list[Frame] = []
    for frame in frames:
        if _C10D not in _file(frame) and _DDP not in _file(frame):
            break
        chain.append(frame)
    return chain


def _kind_of_ddp(chain: Sequence[Frame]) -> WaitKind | None:
    inside = [frame[2] for frame in chain if _DDP in _file(frame)]
    if not inside:
        return None
    if any(name in _BUFFERS for name in inside):
        return WaitKind.BUFFERS
    return WaitKind.WRAPPING if any(name in _WRAPPING for name in inside) else WaitKind.FORWARD


def _file(frame: Frame) -> str:
    return str(frame[0])

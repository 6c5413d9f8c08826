"""Composable `replicate`: its DDP wraps a list of parameters, in which names are numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType

import torch

from ddpcheck import torch_compat

# Frames between DDP's constructor and the method of `replicate` that calls it, and some of ddpcheck.
_MAX_FRAMES = 16


@dataclass(frozen=True)
class OriginalNames:
    """The name of the module that was given to `replicate`, and of its parameters by their name in the list."""

    module: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def original_names(module: torch.nn.Module) -> OriginalNames:
    """For a list of parameters that `replicate` is about to wrap; empty for any other module."""
    if not isinstance(module, torch.nn.ParameterList):
        return OriginalNames()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if owner is not None and torch_compat.read(torch_compat.REPLICATED_LIST, owner) is module:
            names = torch_compat.read(torch_compat.REPLICATED_NAMES, owner, ())
            given = type(getattr(owner, "module", module)).__name__
            # `replicate` makes a class of its own, named after the module's.
            name = given.removeprefix("DDP") or given
            return OriginalNames(name, {str(index): each for index, each in enumerate(names)})
        frame = frame.f_back
    return OriginalNames()

"""Finds the line of the user's own code that led to the current call."""

from __future__ import annotations

import os
import sys
from types import FrameType

import ddpcheck

# Deeper than any framework goes between a script and torch; bounds the search in a deep recursion.
_MAX_FRAMES = 200
_PACKAGES = ("site-packages", "dist-packages")
# The standard library, and ddpcheck itself: in a checkout the probes are next to the package.
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep
    for path in (
        os.path.abspath(os.__file__),
        os.path.abspath(ddpcheck.__file__),
        os.path.dirname(os.path.realpath(__file__)),
    )
)


def user_callsite() -> str:
    """`/home/me/train.py:41`, the innermost call outside of libraries; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if _is_user_code(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_user_code(file: str) -> bool:
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return not any(f"{os.sep}{name}{os.sep}" in file for name in _PACKAGES)

"""Finds the frames of ddpcheck's own code in tracebacks and stacks."""

from __future__ import annotations

import re
from pathlib import Path

import ddpcheck
import ddpcheck.probes
import ddpcheck.reports

# The folders of the packages themselves: a checkout may lie in a folder called ddpcheck, and so may its .venv.
_FOLDERS = tuple(
    Path(package.__path__[0]).resolve() for package in (ddpcheck, ddpcheck.probes, ddpcheck.reports)
)
_FRAME = re.compile(r'File "([^"]+)", line \d+')


def frames_of_ddpcheck(text: str) -> list[str]:
    """The files of ddpcheck that appear as frames of a traceback in `text`."""
    return [path for path in _FRAME.findall(text) if is_of_ddpcheck(path)]


def is_of_ddpcheck(path: str) -> bool:
    """Whether a source file belongs to ddpcheck."""
    return any(Path(path).resolve().is_relative_to(folder) for folder in _FOLDERS)

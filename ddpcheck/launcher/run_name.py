"""A short name for a run, taken from the script that the command runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

_MODULE_OPTIONS = {"-m", "--module"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_LONGEST = 40


def run_name(command: Sequence[str]) -> str:
    """`train` for `torchrun --nproc 4 train.py`; always fit to be part of a file name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", _script(command)).strip("-.")
    return name[:_LONGEST] or "run"


def _script(command: Sequence[str]) -> str:
    for argument in command:
        if argument.endswith((".py", ".sh")) and not argument.startswith("-"):
            return PurePath(argument).stem
    for option, module in pairwise(command):
        if option in _MODULE_OPTIONS and module not in _LAUNCHER_MODULES and re.fullmatch(r"[\w.]+", module):
            return module.removesuffix(".__main__").rsplit(".", 1)[-1]
    return PurePath(command[0]).name if command else ""

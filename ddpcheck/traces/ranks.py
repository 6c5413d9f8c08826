"""Whose trace a file is: what it says itself, else what its name says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_IN_NAMES = re.compile(r"(?:rank|worker|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)


def rank_of(file: str, info: Any, in_args: int | None) -> int | None:
    """The rank, or None where nothing tells it."""
    if isinstance(info, Mapping) and isinstance(info.get("rank"), int):
        return int(info["rank"])
    if in_args is not None:
        return in_args
    named = _IN_NAMES.search(PurePath(file).name)
    return int(named[1]) if named else None


def world_size_of(info: Any) -> int | None:
    """How many ranks the job had, where the trace says so."""
    size = info.get("world_size") if isinstance(info, Mapping) else None
    return size if isinstance(size, int) else None

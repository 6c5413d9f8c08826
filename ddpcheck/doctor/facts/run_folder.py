"""Whether a run folder can be made where `ddpcheck run` would make it, and how much room there is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

_MOUNTS = "/proc/self/mounts"


def folder_facts(folder: Path) -> dict[str, Any]:
    """Of the folder itself, or of the nearest one above that is there."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    facts: dict[str, Any] = {"path": str(folder.absolute()), "kind": _file_system(there)}
    try:
        with tempfile.TemporaryDirectory(prefix=".ddpcheck-doctor-", dir=there) as trial:
            Path(trial, "file").write_bytes(b"written")
        room = os.statvfs(there)
    except OSError as error:
        return {**facts, "writable": False, "reason": f"{there}: {error.strerror or error}"}
    return {**facts, "writable": True, "free": room.f_bavail * room.f_frsize}


def _file_system(path: Path) -> str:
    """The kind of the mount that `path` lies in; empty where that is not told."""
    try:
        with open(_MOUNTS) as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    place = os.path.realpath(path)
    over = [row for row in mounts if len(row) > 2 and _is_below(place, row[1])]
    return max(over, key=lambda row: len(row[1]))[2] if over else ""


def _is_below(path: str, mount: str) -> bool:
    return mount == "/" or path == mount or path.startswith(f"{mount}/")

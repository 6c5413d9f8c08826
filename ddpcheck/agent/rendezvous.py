"""Notes that a process waits for the other ranks in `init_process_group`, in a small file of the run folder.

Before the group exists the process has no record file. The note lasts as long as the call.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from ddpcheck.privacy import mask_text
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.records.rendezvous import JOINING_FILES

# Positions among the arguments of init_process_group.
_WORLD_SIZE, _RANK = 3, 4
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RendezvousNote:
    """The note of this process."""

    def __init__(self, run_dir: str) -> None:
        self._folder = Path(run_dir)
        self._path: Path | None = None

    def write(self, *args: Any, **kwargs: Any) -> None:
        rank = _number(args, kwargs, _RANK, "rank", "RANK")
        world_size = _number(args, kwargs, _WORLD_SIZE, "world_size", "WORLD_SIZE")
        if rank is None or world_size is None or world_size < 2:
            return
        environ = os.environ
        host = socket.gethostname()
        one_host = (
            environ.get("LOCAL_WORLD_SIZE") == str(world_size) or environ.get("MASTER_ADDR") in _LOOPBACK
        )
        note = {
            "rank": rank,
            "world_size": world_size,
            "host": host,
            "pid": os.getpid(),
            "where": mask_text(user_callsite()),
            # Whether the other ranks are on this host too.
            "one_host": one_host,
        }
        path = self._folder / JOINING_FILES.replace("*", f"{host}-{os.getpid()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(note, file)
        self._path = path

    def remove(self, *_: Any, **__: Any) -> None:
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def _number(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, variable: str
) -> int | None:
    given = kwargs.get(name, args[position] if len(args) > position else -1)
    if type(given) is int and given >= 0:
        return given
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None

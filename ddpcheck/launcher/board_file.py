"""The file behind the board, in memory of this node, for as long as the run lasts."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.agent.shm_exchange import make_board


@contextlib.contextmanager
def board_file() -> Iterator[Path | None]:
    """A board that only this user can open; None where there is no room for one.

    Never in the run folder: that may lie on a network file system, where a shared mapping can fail in ways
    that kill a process.
    """
    path: Path | None = None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        candidate = Path(folder) / f"ddpcheck-{os.getuid()}-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            make_board(candidate)
            path = candidate
            break
    try:
        yield path
    finally:
        if path is not None:
            path.unlink(missing_ok=True)

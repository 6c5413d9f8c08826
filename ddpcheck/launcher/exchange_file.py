"""The shared-memory file of this node's ranks: created for one run, removed with it or by a later run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.agent.shm_exchange import create_exchange, exchange_in
from ddpcheck.config import Config
from ddpcheck.machine_identity import is_on_this_machine

FOLDERS = ("/dev/shm", tempfile.gettempdir())
_PREFIX = "ddpcheck-run-"
# Of a file that its launcher has not locked yet.
_NEW_PREFIX = ".ddpcheck-new-"
_LOCKED_AFTER_SECONDS = 60.0


@contextlib.contextmanager
def exchange_file(run_dir: Path) -> Iterator[Path | None]:
    """The shared-memory file of this node's ranks, accessible to this user only; None if none can be created.

    In the run folder only as a last resort, and never on a network file system: there, an access to a shared mapping
    can kill the process.
    """
    path: Path | None = None
    lock: int | None = None
    for folder in (*FOLDERS, *([str(run_dir)] if is_on_this_machine(run_dir) else [])):
        _remove_abandoned(Path(folder))
        with contextlib.suppress(OSError):
            path, lock = _create_locked(Path(folder))
            break
    try:
        yield path
    finally:
        if path is not None:
            for each in (path, exchange_in(str(run_dir), str(path))):
                # The run folder may be gone, or something else by now.
                with contextlib.suppress(OSError):
                    each.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _create_locked(folder: Path) -> tuple[Path, int]:
    """A new file and the descriptor that holds its lock. It gets its name only when it is locked."""
    name = f"{os.getuid()}-{uuid.uuid4().hex[:12]}"
    unlocked, path = folder / f"{_NEW_PREFIX}{name}", folder / f"{_PREFIX}{name}"
    try:
        create_exchange(unlocked)
        # Held until this process ends, however it ends. Its children do not inherit it.
        lock = os.open(unlocked, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            unlocked.rename(path)
        except OSError:
            os.close(lock)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            unlocked.unlink(missing_ok=True)
        raise
    return path, lock


def exchanges_in_use(config: Config) -> list[Path]:
    """The files through which ranks of this launcher exchange: those in containers may have made one of their own."""
    if not config.exchange_file:
        return []
    own, shared = Path(config.exchange_file), exchange_in(config.run_dir, config.exchange_file)
    # Made by another user, the launcher may not read it.
    return [own, shared] if os.access(shared, os.R_OK | os.W_OK) else [own]


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of launchers that were killed. A lock shows that the launcher exists, in any container."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            _remove_unlocked(path)
    for path in folder.glob(f"{_NEW_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            # One that was created just now may not be locked yet.
            if abs(time.time() - path.lstat().st_ctime) > _LOCKED_AFTER_SECONDS:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)

"""Why processes of a job that use torch are not watched: their environment, options, mounts, or a program between."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ddpcheck.config import ENV_CONFIG
from ddpcheck.launcher.process.command import BOOTSTRAP
from ddpcheck.launcher.process.process_table import descendants
from ddpcheck.records.reasons import Unwatched

# Looks at the processes at these times after the start, in seconds, and then every MOST_SECONDS until a rank reports.
LOOK_SECONDS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0)
MOST_SECONDS = 30.0
_CLIENTS = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "buildah", "kubectl", "crictl"), Unwatched.CONTAINER),
    **dict.fromkeys(("ssh", "srun", "pdsh", "ray", "spark-submit", "dask"), Unwatched.REMOTE),
}
_ISOLATING = frozenset("IES")
# Options of an interpreter with a value, and what ends them.
_WITH_VALUE = ("-W", "-X")
_ENDS = ("-", "-c", "-m")
_TORCH = "libtorch"


class UnwatchedProcesses:
    """Looks at the descendants of this launcher until a rank has reported, and logs what it sees, each kind once."""

    def __init__(self, run_dir: str, log: Callable[[Unwatched, str], None]) -> None:
        self._run_dir = run_dir
        self._log = log
        self._seen: set[Unwatched] = set()
        self._began = time.monotonic()
        self._due = list(LOOK_SECONDS)

    def tick(self) -> None:
        now = time.monotonic() - self._began
        if now < self._due[0]:
            return
        self._due = [each for each in self._due if each > now] or [now + MOST_SECONDS]
        for process in descendants(os.getpid()):
            reason = why_unwatched(process.pid, self._run_dir)
            if reason is not None and reason not in self._seen:
                self._seen.add(reason)
                self._log(reason, process.name)


def why_unwatched(pid: int, run_dir: str, proc: Path = Path("/proc")) -> Unwatched | None:
    """None for a process that is watched, does not use torch, or cannot be read."""
    folder = proc / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        client = _CLIENTS.get(os.path.basename(words[0]))
        if client is not None:
            return client
        if _TORCH not in (folder / "maps").read_text(errors="replace"):
            return None
        environ = dict(_pairs((folder / "environ").read_bytes().decode(errors="replace").split("\0")))
        return _reason(folder / "root", words, environ, run_dir)
    except OSError:
        return None


def _reason(root: Path, words: Sequence[str], environ: dict[str, str], run_dir: str) -> Unwatched | None:
    if ENV_CONFIG not in environ or BOOTSTRAP not in environ.get("PYTHONPATH", "").split(os.pathsep):
        return Unwatched.ENVIRONMENT
    if isolates(words):
        return Unwatched.OPTIONS
    # As the process sees them.
    if not (root / BOOTSTRAP.lstrip("/")).is_dir():
        return Unwatched.NOT_INSTALLED
    runs = root / run_dir.lstrip("/")
    if not runs.is_dir():
        return Unwatched.NO_FOLDER
    return None if _may_write(root.parent, runs) else Unwatched.OTHER_USER


def _may_write(process: Path, folder: Path) -> bool:
    """Whether the user of a process may write to a folder, by its permissions."""
    lines = (process / "status").read_text(errors="replace").splitlines()
    ids = {
        name: [int(each) for each in text.split()]
        for name, _, text in (line.partition(":") for line in lines)
        if name in ("Uid", "Gid", "Groups")
    }
    # Real, effective, saved, and that of the file system.
    user, groups = ids["Uid"][1], {ids["Gid"][1], *ids["Groups"]}
    status = folder.stat()
    if user == 0:
        return True
    if user == status.st_uid:
        return bool(status.st_mode & stat.S_IWUSR)
    return bool(status.st_mode & (stat.S_IWGRP if status.st_gid in groups else stat.S_IWOTH))


def isolates(words: Sequence[str]) -> bool:
    """Whether the options of an interpreter let it ignore PYTHONPATH or sitecustomize."""
    for word, before in zip(words[1:], words, strict=False):
        if before in _WITH_VALUE:
            continue
        if not word.startswith("-") or word in _ENDS:
            return False
        if not word.startswith("--") and _ISOLATING & set(word[1:]) and word[:2] not in _WITH_VALUE:
            return True
    return False


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, equals, value = line.partition("=")
        if equals:
            yield name, value

"""Ends the processes that a job leaves behind.

ddpcheck becomes the parent of all orphans of the job (a "subreaper"), so it finds all of them, including processes
in their own session. Ranks under torchrun have their own session; a rank that outlives its launcher would keep its
GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

from ddpcheck.launcher.process.process_table import Process, descendants
from ddpcheck.records.node_log import NodeLog

GRACE_SECONDS = 5.0  # for processes that end by themselves after the command, such as resource trackers
TERM_SECONDS = 5.0
KILL_SECONDS = 5.0
# Children that other parts of ddpcheck wait for are zombies for less time than this.
_ZOMBIE_SECONDS = 1.0

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants; False if the system does not support it."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def signal_all(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


class ZombieReaper:
    """Reaps adopted zombies, except those that another part of ddpcheck waits for."""

    def __init__(self, exclude: Iterable[int]) -> None:
        self._excluded = set(exclude)
        self._zombies_since: dict[tuple[int, int], float] = {}

    def reap(self, processes: Iterable[Process], *, at_once: bool = False) -> bool:
        """Reap zombie children; True if some are too recent and another call is needed."""
        now = time.monotonic()
        zombies = {
            (process.pid, process.started): process
            for process in processes
            if process.parent == os.getpid() and process.state == "Z" and process.pid not in self._excluded
        }
        self._zombies_since = {key: self._zombies_since.get(key, now) for key in zombies}
        for key, since in list(self._zombies_since.items()):
            if at_once or now - since >= _ZOMBIE_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(key[0], os.WNOHANG)
                del self._zombies_since[key]
        return bool(self._zombies_since)


class OrphanTerminator:
    """Ends remaining processes in three steps: wait, SIGTERM, SIGKILL."""

    def __init__(
        self, exclude: Iterable[int], zombies: ZombieReaper, node_log: NodeLog, *, grace: float
    ) -> None:
        self._excluded = set(exclude)
        self._zombies = zombies
        self._node_log = node_log
        self._grace = grace
        self._since = time.monotonic()
        self._terminated_at: float | None = None
        self._killed_at: float | None = None

    def kill_now(self) -> None:
        """Kill all remaining processes at the next step."""
        self._terminated_at = self._terminated_at or time.monotonic()
        self._killed_at = self._killed_at or time.monotonic()

    def advance(self) -> bool:
        """Do the next step; True if no process remains, or nothing more can be done."""
        processes = descendants(os.getpid(), self._excluded)
        self._zombies.reap(processes, at_once=True)
        remaining = [process for process in processes if not process.is_gone]
        if not remaining:
            return True
        now = time.monotonic()
        if self._killed_at is not None:
            signal_all(remaining, signal.SIGKILL)
            if now - self._killed_at > KILL_SECONDS:
                self._log(remaining, "survived SIGKILL")
                return True
        elif self._terminated_at is not None:
            if now - self._terminated_at > TERM_SECONDS:
                self._killed_at = now
                self._log(remaining, "SIGKILL")
                signal_all(remaining, signal.SIGKILL)
        elif now - self._since >= self._grace:
            self._terminated_at = now
            self._log(remaining, "SIGTERM")
            signal_all(remaining, signal.SIGTERM)
            signal_all(remaining, signal.SIGCONT)  # a stopped process receives SIGTERM only after SIGCONT
        return False

    def _log(self, remaining: list[Process], action: str) -> None:
        processes = [{"pid": process.pid, "name": process.name} for process in remaining]
        self._node_log.write("leftover", action=action, processes=processes)

"""Sees to it that no process outlives the run.

ddpcheck becomes the parent of everything the job orphans (a "subreaper"), so nothing can slip away. A
daemon that put itself into a session of its own ends with the run as well: ranks under torchrun do just
that, and a rank that outlives its launcher, holding its GPU, is what this is for.
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

PATIENCE_SECONDS = 5.0  # for what ends by itself once the command has, such as resource trackers
TERM_SECONDS = 5.0
KILL_SECONDS = 5.0
# A child that some part of ddpcheck started and waits for is a zombie for an instant only.
_ZOMBIE_SECONDS = 1.0

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of orphans below this process; False where the system does not offer it."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def signal_all(processes: Iterable[Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


class Orphans:
    """Reaps adopted processes without taking a status that somebody waits for."""

    def __init__(self, spare: Iterable[int]) -> None:
        self._spare = set(spare)
        self._seen: dict[tuple[int, int], float] = {}

    def reap(self, processes: Iterable[Process], *, at_once: bool = False) -> bool:
        """Reap zombie children; True if some are too young and another look is due."""
        now = time.monotonic()
        zombies = {
            (process.pid, process.started): process
            for process in processes
            if process.parent == os.getpid() and process.state == "Z" and process.pid not in self._spare
        }
        self._seen = {key: self._seen.get(key, now) for key in zombies}
        for key, since in list(self._seen.items()):
            if at_once or now - since >= _ZOMBIE_SECONDS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(key[0], os.WNOHANG)
                del self._seen[key]
        return bool(self._seen)


class OrphanReaper:
    """Ends, step by step, what the command left behind: patience, SIGTERM, SIGKILL."""

    def __init__(self, spare: Iterable[int], orphans: Orphans, node_log: NodeLog, *, patience: float) -> None:
        self._spare = set(spare)
        self._orphans = orphans
        self._node_log = node_log
        self._patience = patience
        self._since = time.monotonic()
        self._termed_at: float | None = None
        self._killed_at: float | None = None

    def hurry(self) -> None:
        """Kill what is left at the next step."""
        self._termed_at = self._termed_at or time.monotonic()
        self._killed_at = self._killed_at or time.monotonic()

    def advance(self) -> bool:
        """One step further; True when nothing is left, or nothing more can be done."""
        found = descendants(os.getpid(), self._spare)
        self._orphans.reap(found, at_once=True)
        left = [process for process in found if not process.is_gone]
        if not left:
            return True
        now = time.monotonic()
        if self._killed_at is not None:
            signal_all(left, signal.SIGKILL)
            if now - self._killed_at > KILL_SECONDS:
                self._note(left, "survived SIGKILL")
                return True
        elif self._termed_at is not None:
            if now - self._termed_at > TERM_SECONDS:
                self._killed_at = now
                self._note(left, "SIGKILL")
                signal_all(left, signal.SIGKILL)
        elif now - self._since >= self._patience:
            self._termed_at = now
            self._note(left, "SIGTERM")
            signal_all(left, signal.SIGTERM)
            signal_all(left, signal.SIGCONT)  # a stopped process takes its SIGTERM only when continued
        return False

    def _note(self, left: list[Process], action: str) -> None:
        processes = [{"pid": process.pid, "name": process.name} for process in left]
        self._node_log.write("leftover", action=action, processes=processes)

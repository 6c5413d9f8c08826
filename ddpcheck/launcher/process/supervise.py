"""Runs the user's command until it ends: forwards signals, executes stop requests, ends remaining processes.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddpcheck.launcher.process.command import ExitStatus, start
from ddpcheck.launcher.process.process_table import Process, descendants
from ddpcheck.launcher.process.signals import GroupSignalDetector, SignalInbox, signal_name, stop_self
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

    @property
    def pending(self) -> bool:
        """Whether some were too recent, or still had threads, and another call is needed."""
        return bool(self._zombies_since)

    def reap(self, processes: Iterable[Process], *, at_once: bool = False) -> set[int]:
        """Reap zombie children, and return their ids."""
        now = time.monotonic()
        zombies = {
            (process.pid, process.started): process
            for process in processes
            if process.parent == os.getpid() and process.state == "Z" and process.pid not in self._excluded
        }
        self._zombies_since = {key: self._zombies_since.get(key, now) for key in zombies}
        reaped = set()
        for key, since in list(self._zombies_since.items()):
            if at_once or now - since >= _ZOMBIE_SECONDS:
                pid = key[0]
                with contextlib.suppress(ChildProcessError):
                    pid = os.waitpid(pid, os.WNOHANG)[0]
                if pid:
                    reaped.add(pid)
                    del self._zombies_since[key]
        return reaped


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
        reaped = self._zombies.reap(processes, at_once=True)
        # A process whose first thread has exited is a zombie, but its other threads may run and hold its memory.
        remaining = [process for process in processes if process.pid not in reaped]
        if not remaining:
            return True
        now = time.monotonic()
        ending = all(process.is_gone for process in remaining)
        if ending and self._killed_at is None and now - self._since < _ZOMBIE_SECONDS:
            return False
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


STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL when ddpcheck stops the job
# Senders that signal the processes of a job one by one need this long to reach all of them.
_SIGNAL_DELAY_SECONDS = 0.05
# GNU timeout signals the process and then its group: two signals within this time count as one.
_SAME_KEYPRESS_SECONDS = 0.3
_CLEANUP_TICK_SECONDS = 0.02


@dataclass(frozen=True)
class StopRequest:
    """A request to stop the job, with its reason."""

    reason: str


class Screen(Protocol):
    """The live view, which is hidden while ddpcheck is stopped."""

    def resized(self) -> None: ...

    def hide(self) -> None: ...

    def unhide(self) -> None: ...


OnTick = Callable[[], "StopRequest | None"]


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    on_tick: OnTick,
    tick_seconds: float = 0.1,
    node_log: NodeLog,
    screen: Screen | None = None,
) -> ExitStatus:
    """Run `command` and return how it ended. Must run on the main thread; calls `on_tick` there too."""
    # Children that ddpcheck started itself are not part of the job.
    own_children = [process.pid for process in descendants(os.getpid())]
    adopt_orphans()
    with SignalInbox() as inbox:
        group_signals = GroupSignalDetector()
        try:
            pid = start(command, environ)
            node_log.write_node(pid)
            supervision = _Supervision(
                pid, inbox, group_signals, own_children, on_tick, tick_seconds, node_log, screen
            )
            return supervision.run()
        finally:
            group_signals.close()


class _Supervision:
    """Supervises one command until its last descendant has ended."""

    def __init__(
        self,
        pid: int,
        inbox: SignalInbox,
        group_signals: GroupSignalDetector,
        own_children: Sequence[int],
        on_tick: OnTick,
        tick_seconds: float,
        node_log: NodeLog,
        screen: Screen | None,
    ) -> None:
        self._pid = pid
        self._screen = screen
        self._inbox = inbox
        self._group_signals = group_signals
        self._own_children = own_children
        self._on_tick = on_tick
        self._tick_seconds = tick_seconds
        self._node_log = node_log
        self._zombies = ZombieReaper([pid, *own_children])
        self._status: int | None = None
        self._pending_signals: list[tuple[float, int]] = []  # when to handle a signal, and its number
        self._interrupted_at: float | None = None
        self._stop: StopRequest | None = None
        self._kill_at: float | None = None
        self._zombies_expected = False
        self._last_fault = ""
        self._next_tick = time.monotonic()

    def run(self) -> ExitStatus:
        while self._status is None:
            self._step(self._tick_seconds)
            self._reap()
        self._log_exit()
        self._end_remaining()
        reason = self._stop.reason if self._stop else ""
        return ExitStatus.from_wait(
            self._status, interrupted=self._interrupted_at is not None, stop_reason=reason
        )

    def _step(self, tick_seconds: float) -> None:
        """Wait for the next event or deadline, and handle it."""
        now = time.monotonic()
        due = min([now + tick_seconds, self._next_tick, *(when for when, _ in self._pending_signals)])
        for number in self._inbox.wait(due - now):
            self._receive(number)
        self._handle_signals()
        if time.monotonic() >= self._next_tick:
            self._tick()
            self._next_tick = time.monotonic() + self._tick_seconds
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_everything()

    def _receive(self, number: int) -> None:
        if number == signal.SIGWINCH and self._screen is not None:
            self._screen.resized()
        if number == signal.SIGCHLD:
            self._zombies_expected = True
        elif number not in {waiting for _, waiting in self._pending_signals}:
            # Repetitions of a pending signal are merged, as in the kernel.
            self._pending_signals.append((time.monotonic() + _SIGNAL_DELAY_SECONDS, number))

    def _handle_signals(self) -> None:
        now = time.monotonic()
        due = [number for when, number in self._pending_signals if when <= now]
        self._pending_signals = [(when, number) for when, number in self._pending_signals if when > now]
        for number in due:
            forward = not self._group_signals.group_received(number) and self._status is None
            if forward:
                os.kill(self._pid, number)
            self._node_log.write("signal", signal=signal_name(number), forwarded=forward)
            if number == signal.SIGINT:
                self._interrupt(now)
            elif number == signal.SIGTSTP:
                self._stop_self()

    def _stop_self(self) -> None:
        if self._screen is not None:
            self._screen.hide()
        stop_self()
        if self._screen is not None:
            self._screen.unhide()

    def _interrupt(self, now: float) -> None:
        if self._interrupted_at is not None and now - self._interrupted_at > _SAME_KEYPRESS_SECONDS:
            self._kill_at = now
        self._interrupted_at = now

    def _tick(self) -> None:
        try:
            request = self._on_tick()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._last_fault:  # log it once, not at every tick
                self._node_log.write("fault", probe="launcher", entry="on_tick", error=fault)
            self._last_fault = fault
            return
        if request is not None and self._stop is None and self._status is None:
            self._stop = request
            self._kill_at = time.monotonic() + STOP_SECONDS
            self._node_log.write("stop", reason=request.reason)
            os.kill(self._pid, signal.SIGTERM)
            os.kill(self._pid, signal.SIGCONT)  # a stopped process receives SIGTERM only after SIGCONT

    def _kill_everything(self) -> None:
        # Parents may start processes while they are being killed; the next step kills those.
        signal_all(descendants(os.getpid(), self._excluded()), signal.SIGKILL)

    def _reap(self) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._status = status
        elif self._zombies_expected:
            self._zombies.reap(descendants(os.getpid(), self._excluded()))
            self._zombies_expected = self._zombies.pending

    def _log_exit(self) -> None:
        ended = ExitStatus.from_wait(self._status or 0)
        name = None if ended.signal is None else signal_name(ended.signal)
        self._node_log.write("command_exit", status=ended.returncode, signal=name)

    def _end_remaining(self) -> None:
        # A job that ddpcheck stops has had its grace period already.
        grace = 0.0 if self._stop else GRACE_SECONDS
        terminator = OrphanTerminator(self._excluded(), self._zombies, self._node_log, grace=grace)
        while not terminator.advance():
            if self._kill_at is not None and not self._stop:
                terminator.kill_now()
            self._step(_CLEANUP_TICK_SECONDS)

    def _excluded(self) -> list[int]:
        return [*self._own_children, self._group_signals.pid]

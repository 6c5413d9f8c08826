"""Runs the user's command to its end: signals pass through, stops are carried out, nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddpcheck.launcher.process.command import ExitStatus, start
from ddpcheck.launcher.process.orphans import (
    PATIENCE_SECONDS,
    OrphanReaper,
    Orphans,
    adopt_orphans,
    signal_all,
)
from ddpcheck.launcher.process.process_table import descendants
from ddpcheck.launcher.process.signals import GroupSignalDetector, SignalInbox, signal_name, stop_self
from ddpcheck.records.node_log import NodeLog

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL when ddpcheck stops the job
# Senders that signal every process of a job one by one need a moment to get round to the witness.
_SETTLE_SECONDS = 0.05
# GNU timeout sends its signal to the process and to its group: two signals, one intention.
_SAME_KEYPRESS_SECONDS = 0.3
_LEFTOVER_TICK_SECONDS = 0.02


@dataclass(frozen=True)
class StopRequest:
    """The job is to be stopped, and why."""

    reason: str


class Screen(Protocol):
    """What ddpcheck shows on the terminal meanwhile, and takes away while it is stopped."""

    def resized(self) -> None: ...

    def put_away(self) -> None: ...

    def bring_back(self) -> None: ...


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
    """Run `command` and return how it ended. Belongs on the main thread, where `on_tick` is called too."""
    # Children of our own making are nobody's leftovers.
    own_children = [process.pid for process in descendants(os.getpid())]
    adopt_orphans()
    with SignalInbox() as inbox:
        witness = GroupSignalDetector()
        try:
            pid = start(command, environ)
            node_log.write_node(pid)
            supervision = _Supervision(
                pid, inbox, witness, own_children, on_tick, tick_seconds, node_log, screen
            )
            return supervision.run()
        finally:
            witness.close()


class _Supervision:
    """One command, from its start to the end of the last process under it."""

    def __init__(
        self,
        pid: int,
        inbox: SignalInbox,
        witness: GroupSignalDetector,
        own_children: Sequence[int],
        on_tick: OnTick,
        tick_seconds: float,
        node_log: NodeLog,
        screen: Screen | None,
    ) -> None:
        self._pid = pid
        self._screen = screen
        self._inbox = inbox
        self._witness = witness
        self._own_children = own_children
        self._on_tick = on_tick
        self._tick_seconds = tick_seconds
        self._node_log = node_log
        self._orphans = Orphans([pid, *own_children])
        self._status: int | None = None
        self._arrived: list[tuple[float, int]] = []  # when to decide on a signal, and which
        self._interrupted_at: float | None = None
        self._stop: StopRequest | None = None
        self._kill_at: float | None = None
        self._look_for_orphans = False
        self._tick_fault = ""
        self._next_tick = time.monotonic()

    def run(self) -> ExitStatus:
        while self._status is None:
            self._turn(self._tick_seconds)
            self._reap()
        self._note_exit()
        self._end_leftovers()
        reason = self._stop.reason if self._stop else ""
        return ExitStatus.from_wait(
            self._status, interrupted=self._interrupted_at is not None, stop_reason=reason
        )

    def _turn(self, tick_seconds: float) -> None:
        """Wait for the next thing to do, and do it."""
        now = time.monotonic()
        due = min([now + tick_seconds, self._next_tick, *(when for when, _ in self._arrived)])
        for number in self._inbox.wait(due - now):
            self._receive(number)
        self._decide_on_signals()
        if time.monotonic() >= self._next_tick:
            self._tick()
            self._next_tick = time.monotonic() + self._tick_seconds
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_everything()

    def _receive(self, number: int) -> None:
        if number == signal.SIGWINCH and self._screen is not None:
            self._screen.resized()
        if number == signal.SIGCHLD:
            self._look_for_orphans = True
        elif number not in {waiting for _, waiting in self._arrived}:
            # One that is still undecided stands for its repetitions, as a pending signal does in the kernel.
            self._arrived.append((time.monotonic() + _SETTLE_SECONDS, number))

    def _decide_on_signals(self) -> None:
        now = time.monotonic()
        ripe = [number for when, number in self._arrived if when <= now]
        self._arrived = [(when, number) for when, number in self._arrived if when > now]
        for number in ripe:
            forward = not self._witness.saw(number) and self._status is None
            if forward:
                os.kill(self._pid, number)
            self._node_log.write("signal", signal=signal_name(number), forwarded=forward)
            if number == signal.SIGINT:
                self._interrupt(now)
            elif number == signal.SIGTSTP:
                self._stop_self()

    def _stop_self(self) -> None:
        if self._screen is not None:
            self._screen.put_away()
        stop_self()
        if self._screen is not None:
            self._screen.bring_back()

    def _interrupt(self, now: float) -> None:
        if self._interrupted_at is not None and now - self._interrupted_at > _SAME_KEYPRESS_SECONDS:
            self._kill_at = now
        self._interrupted_at = now

    def _tick(self) -> None:
        try:
            request = self._on_tick()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._tick_fault:  # once, not ten times a second
                self._node_log.write("fault", probe="launcher", entry="on_tick", error=fault)
            self._tick_fault = fault
            return
        if request is not None and self._stop is None and self._status is None:
            self._stop = request
            self._kill_at = time.monotonic() + STOP_SECONDS
            self._node_log.write("stop", reason=request.reason)
            os.kill(self._pid, signal.SIGTERM)
            os.kill(self._pid, signal.SIGCONT)  # a stopped process takes its SIGTERM only when continued

    def _kill_everything(self) -> None:
        # Parents may start more while they are being killed; the next turn gets those.
        signal_all(descendants(os.getpid(), self._spared()), signal.SIGKILL)

    def _reap(self) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._status = status
        elif self._look_for_orphans:
            self._look_for_orphans = self._orphans.reap(descendants(os.getpid(), self._spared()))

    def _note_exit(self) -> None:
        ended = ExitStatus.from_wait(self._status or 0)
        name = None if ended.signal is None else signal_name(ended.signal)
        self._node_log.write("command_exit", status=ended.returncode, signal=name)

    def _end_leftovers(self) -> None:
        # A job that is being stopped has had its time.
        patience = 0.0 if self._stop else PATIENCE_SECONDS
        leftovers = OrphanReaper(self._spared(), self._orphans, self._node_log, patience=patience)
        while not leftovers.advance():
            if self._kill_at is not None and not self._stop:
                leftovers.hurry()
            self._turn(_LEFTOVER_TICK_SECONDS)

    def _spared(self) -> list[int]:
        return [*self._own_children, self._witness.pid]

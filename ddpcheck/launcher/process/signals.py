"""Receives the signals meant for the command, and detects which of them the command received as well."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from types import FrameType
from typing import Any

# Ends when ddpcheck closes the pipe or exits.
_WAIT_FOR_DDPCHECK = "import os; os.read(0, 1)"


class GroupSignalDetector:
    """Detects whether a signal went to the whole process group, by a child process that has all signals blocked.

    A signal that is pending in the child was sent to the group, so the command has received it too. The child exits
    when ddpcheck does, even after SIGKILL: its standard input closes.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._pipe = -1
        self._start()

    def group_received(self, number: int) -> bool:
        """Whether the group received this signal. The child is then replaced, since the signal stays pending."""
        if not (self._pending() >> (number - 1)) & 1:
            return False
        previous, pipe = self.pid, self._pipe
        self._start()
        _end(previous, pipe)
        return True

    def close(self) -> None:
        if self.pid:
            _end(self.pid, self._pipe)
            self.pid = 0

    def _start(self) -> None:
        read_end, self._pipe = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                # Without site and environment: no code of the user or of ddpcheck runs in it.
                [sys.executable, "-I", "-S", "-c", _WAIT_FOR_DDPCHECK],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read_end, 0),
                    (os.POSIX_SPAWN_DUP2, null, 1),
                    (os.POSIX_SPAWN_DUP2, null, 2),
                ],
                setsigmask=signal.valid_signals(),
            )
        except OSError:
            os.close(self._pipe)
            self.pid = 0  # without the child, every signal counts as sent to ddpcheck only
        finally:
            os.close(read_end)
            os.close(null)

    def _pending(self) -> int:
        pending = 0
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{self.pid}/status") as file:
            for line in file:
                if line.startswith(("SigPnd:", "ShdPnd:")):
                    pending |= int(line.split()[1], 16)
        return pending if self.pid else 0


def _end(pid: int, pipe: int) -> None:
    os.close(pipe)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# Signals that cannot be handled, that report a fault of this process, or that concern its own reads, writes and
# timers.
_NOT_HANDLED = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGXCPU,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGPROF,
    signal.SIGVTALRM,
}


class SignalInbox:
    """Context manager that receives signals. Ignored signals (nohup, background jobs) stay ignored."""

    def __enter__(self) -> SignalInbox:
        self._read_end, write_end = os.pipe()
        self._write_end = write_end
        os.set_blocking(self._read_end, False)
        os.set_blocking(write_end, False)
        self._poller = select.poll()
        self._poller.register(self._read_end, select.POLLIN)
        # The interpreter writes one byte per signal: no signal is lost while Python is busy.
        self._wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in signal.valid_signals() - _NOT_HANDLED:
            handler = signal.getsignal(number)
            # None: installed by native code, such as a sanitizer; keep it.
            if handler is not None and (handler != signal.SIG_IGN or number == signal.SIGCHLD):
                self._before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, seconds: float) -> list[int]:
        """The received signals, in their order; waits up to `seconds` for the first."""
        if not self._poller.poll(max(0.0, seconds) * 1000):
            return []
        try:
            return list(os.read(self._read_end, 4096))
        except BlockingIOError:
            return []


def stop_self() -> None:
    """Stop this process as SIGTSTP does by default, visible to the shell; returns after SIGCONT."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def signal_name(number: int) -> str:
    """For example SIGTERM for 15; SIG<number> for real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor already delivers the signal."""

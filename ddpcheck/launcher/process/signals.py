"""Takes the signals meant for the command while it runs, in the order they came."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from types import FrameType
from typing import Any

_WAIT_FOR_OUR_END = "import os; os.read(0, 1)"


class GroupSignalDetector:
    """The bystander. It ends by itself when ddpcheck does, even by SIGKILL: its standard input closes."""

    def __init__(self) -> None:
        self.pid = 0
        self._lifeline = -1
        self._begin()

    def saw(self, number: int) -> bool:
        """Whether the group got this signal too; a witness that has seen something is replaced."""
        if not (self._pending() >> (number - 1)) & 1:
            return False
        retired, lifeline = self.pid, self._lifeline
        self._begin()
        _dismiss(retired, lifeline)
        return True

    def close(self) -> None:
        if self.pid:
            _dismiss(self.pid, self._lifeline)
            self.pid = 0

    def _begin(self) -> None:
        read_end, self._lifeline = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                # No site, no environment: nothing of the user's, and nothing of ddpcheck's, runs in it.
                [sys.executable, "-I", "-S", "-c", _WAIT_FOR_OUR_END],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read_end, 0),
                    (os.POSIX_SPAWN_DUP2, null, 1),
                    (os.POSIX_SPAWN_DUP2, null, 2),
                ],
                setsigmask=signal.valid_signals(),
            )
        except OSError:
            os.close(self._lifeline)
            self.pid = 0  # no witness: every signal counts as sent to ddpcheck alone
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


def _dismiss(pid: int, lifeline: int) -> None:
    os.close(lifeline)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# Not taken: what cannot be, what reports a fault of this very process, and what only concerns its own reads,
# writes and timers.
_LEFT_ALONE = {
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
    """Receives signals between `with` and its end; ignored ones (nohup, background jobs) stay ignored."""

    def __enter__(self) -> SignalInbox:
        self._read_end, write_end = os.pipe()
        self._write_end = write_end
        os.set_blocking(self._read_end, False)
        os.set_blocking(write_end, False)
        self._poller = select.poll()
        self._poller.register(self._read_end, select.POLLIN)
        # One byte a signal, written by the interpreter's own handler: nothing is lost while Python is busy.
        self._wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in signal.valid_signals() - _LEFT_ALONE:
            handler = signal.getsignal(number)
            # None: set by something that is not Python, such as a sanitizer; not ours to take.
            if handler is not None and (handler != signal.SIG_IGN or number == signal.SIGCHLD):
                self._before[number] = signal.signal(number, _note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_end)
        os.close(self._write_end)

    def wait(self, seconds: float) -> list[int]:
        """The signals that came, waiting up to `seconds` for the first."""
        if not self._poller.poll(max(0.0, seconds) * 1000):
            return []
        try:
            return list(os.read(self._read_end, 4096))
        except BlockingIOError:
            return []


def stop_self() -> None:
    """Stop as SIGTSTP would have stopped us, for the shell to see; returns when continued."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def signal_name(number: int) -> str:
    """SIGTERM for 15, and so on; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _note(number: int, frame: FrameType | None) -> None:
    """The byte in the pipe is the message."""

"""Tells a signal sent to ddpcheck alone from one that the command has got as well.

A terminal's Ctrl-C, `kill -- -PGID`, GNU timeout and schedulers signal the whole group or job; forwarding
such a signal would deliver it twice, and a handler that is still at work on the first would be interrupted
by the second. The sender does not tell (`si_code` is the same for one process and for a group), so a
bystander in the same group is asked: it blocks every signal, and what it has got stays pending, for /proc
to show.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_WAIT_FOR_OUR_END = "import os; os.read(0, 1)"


class Witness:
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

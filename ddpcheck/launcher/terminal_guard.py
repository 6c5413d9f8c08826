"""A bystander that gives the terminal back should ddpcheck be killed while it holds some of its rows."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

# It ends when told so; at the end of its standard input ddpcheck has gone without a word.
_WAIT = """
import os, sys
if not os.read(0, 1):
    rows = os.get_terminal_size(1).lines
    first = max(1, rows - int(sys.argv[1]) + 1)
    os.write(1, f"\\x1b7\\x1b[?6l\\x1b[r\\x1b[{first};1H\\x1b[J\\x1b8".encode())
"""


class TerminalGuard:
    """One small process, in a session of its own so that what kills the job's group does not kill it."""

    def __init__(self, terminal: int, rows: int) -> None:
        read_end, self._lifeline = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                # No site, no environment: nothing of the user's, and nothing of ddpcheck's, runs in it.
                [sys.executable, "-I", "-S", "-c", _WAIT, str(rows)],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read_end, 0),
                    (os.POSIX_SPAWN_DUP2, terminal, 1),
                    (os.POSIX_SPAWN_DUP2, null, 2),
                ],
                setsid=True,
                setsigmask=signal.valid_signals(),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
            os.close(null)

    def dismiss(self) -> None:
        """All is given back; there is nothing left to guard."""
        with contextlib.suppress(OSError):
            os.write(self._lifeline, b".")
        os.close(self._lifeline)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

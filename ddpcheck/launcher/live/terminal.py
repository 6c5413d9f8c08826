"""The terminal a job runs on, as the launcher sees and writes to it; the job's own descriptors are left alone."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios
from collections.abc import Mapping

_LFLAG = 3
# Terminals that cannot be relied on to keep rows apart.
_PLAIN_TERMINALS = frozenset({"", "dumb", "unknown", "emacs", "cons25"})
# Logs that look like terminals: CI services that hand out one, and notebooks.
_LOGS = ("CI", "BUILDKITE", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION", "JPY_PARENT_PID")
_STDOUT, _STDERR = 1, 2


def wanted(asked: bool | None, quiet: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to show the live view: on a terminal, unless something speaks against it or somebody."""
    if asked is False or quiet or environ.get("TERM", "") in _PLAIN_TERMINALS or not os.isatty(_STDERR):
        return False
    if asked:
        return True
    # Behind a pipe there may be a pager, which has the screen to itself.
    return not any(environ.get(name) for name in _LOGS) and not _is_pipe(_STDOUT)


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class Terminal:
    """The controlling terminal, opened anew: flags that the job sets on its own descriptors are not ours."""

    def __init__(self) -> None:
        # Only of the controlling terminal is there a foreground: asked of stderr, it tells that the two are one.
        os.tcgetpgrp(_STDERR)
        # One view a terminal: of two runs in one script, or one within another, the second goes without.
        self._claim = os.open(os.ttyname(_STDERR), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._claim)
            raise
        self.descriptor = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self.descriptor, select.POLLOUT)

    def size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self.descriptor)
        except OSError:
            return os.terminal_size((0, 0))

    def in_foreground(self) -> bool:
        """Whether this job is the one that the terminal belongs to right now."""
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except OSError:
            return False

    def is_taken(self) -> bool:
        """Whether some program reads single keys, as those do that have the screen to themselves."""
        try:
            flags = termios.tcgetattr(self.descriptor)[_LFLAG]
        except (OSError, termios.error):
            return True
        return not flags & termios.ICANON

    def write(self, data: bytes, patience: float = 0.0) -> bool:
        """All of it in one go, or nothing where the terminal does not take it: stopped by Ctrl-S, or flooded."""
        if not any(event & select.POLLOUT for _, event in self._poller.poll(patience * 1000)):
            return False
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._claim)

"""The controlling terminal, opened separately: the job's own descriptors are not touched."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios
from collections.abc import Mapping

_LFLAG = 3
# Terminals without reliable scroll regions.
_UNSUPPORTED_TERMINALS = frozenset({"", "dumb", "unknown", "emacs", "cons25"})
# Variables of environments whose terminal is a log: CI services and notebooks.
_LOG_VARIABLES = ("CI", "BUILDKITE", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION", "JPY_PARENT_PID")
_STDOUT, _STDERR = 1, 2


def live_view_enabled(requested: bool | None, quiet: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to show the live view: on a supported terminal, unless the user or the environment disables it."""
    if (
        requested is False
        or quiet
        or environ.get("TERM", "") in _UNSUPPORTED_TERMINALS
        or not os.isatty(_STDERR)
    ):
        return False
    if requested:
        return True
    # A pipe may lead to a pager, which uses the whole screen.
    return not any(environ.get(name) for name in _LOG_VARIABLES) and not _is_pipe(_STDOUT)


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class Terminal:
    """The controlling terminal, opened again: flags that the job sets on its descriptors do not affect it."""

    def __init__(self) -> None:
        # Fails unless stderr is the controlling terminal.
        os.tcgetpgrp(_STDERR)
        # One live view per terminal: a second concurrent or nested run gets none.
        self._lock_descriptor = os.open(os.ttyname(_STDERR), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_descriptor)
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
        """Whether this process group is in the foreground."""
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except OSError:
            return False

    def is_in_raw_mode(self) -> bool:
        """Whether a program reads single keys, as full-screen programs and debuggers do."""
        try:
            flags = termios.tcgetattr(self.descriptor)[_LFLAG]
        except (OSError, termios.error):
            return True
        return not flags & termios.ICANON

    def write(self, data: bytes, timeout: float = 0.0) -> bool:
        """Write all data; False, with nothing written, if the terminal is stopped by Ctrl-S or its buffer is full."""
        if not any(event & select.POLLOUT for _, event in self._poller.poll(timeout * 1000)):
            return False
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._lock_descriptor)

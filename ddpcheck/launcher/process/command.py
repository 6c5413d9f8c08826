"""Starting the user's command as a shell would have, and ending as it ended."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ddpcheck.errors import CommandNotStarted


@dataclass(frozen=True)
class ExitStatus:
    """How the command ended."""

    returncode: int  # as `$?` shows it: 128 + N for a death by signal N
    signal: int | None = None
    interrupted: bool = False  # the user pressed Ctrl-C (or sent SIGINT) at least once
    stop_reason: str = ""  # why ddpcheck itself stopped the job, if it did

    @classmethod
    def from_wait(cls, status: int, *, interrupted: bool = False, stop_reason: str = "") -> ExitStatus:
        """From the status that waitpid gives."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return cls(128 + number, number, interrupted, stop_reason)
        return cls(os.WEXITSTATUS(status), None, interrupted, stop_reason)


def start(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start the command and return its process id, with everything a shell would have handed down.

    The same process group, terminal and open descriptors; the signal mask and ignored signals (nohup) as they
    were when ddpcheck started, without those that Python itself ignores.
    """
    path = find_program(command[0], environ.get("PATH", os.defpath))
    _flush()
    try:
        return _spawn(path, command, environ)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise _not_started(command[0], path, error) from error
    # A script without a first line that names its interpreter: shells and execvp hand it to sh.
    return _spawn("/bin/sh", ["/bin/sh", path, *command[1:]], environ)


def _spawn(path: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
    # `cwd` changes nothing, but keeps subprocess from using posix_spawn, by which glibc leaves two of its
    # internal signals ignored in the command and in all that it starts.
    process = subprocess.Popen(command, executable=path, env=environ, close_fds=False, cwd=os.curdir)
    process.returncode = 0  # the supervisor waits for it; Popen need not warn that nobody did
    return process.pid


def find_program(name: str, search_path: str) -> str:
    """Where the program is, by the shell's rules, or the shell's status for why it cannot be started."""
    if os.sep in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder or os.curdir, name) for folder in search_path.split(os.pathsep)]
    blocked = ""
    for path in candidates:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
        # On the search path a folder of that name counts for nothing; named outright, it is the mistake.
        if not blocked and (os.path.isfile(path) or (os.sep in name and os.path.isdir(path))):
            blocked = path
    if not blocked:
        raise CommandNotStarted(_not_found(name), 127)
    if os.path.isdir(blocked):
        raise CommandNotStarted(f"{name}: is a folder, not a command", 126)
    hint = f"make it so with `chmod +x {blocked}`, or put its interpreter before it"
    raise CommandNotStarted(f"{name}: is not executable; {hint}", 126)


def leave_as(status: ExitStatus) -> NoReturn:
    """End this process the way the command ended, to the last bit that a shell or a scheduler can see.

    After a Ctrl-C a shell script goes on or stops depending on whether its command died by the signal, so
    an exit with 130 would not do.
    """
    _flush()
    if status.signal is not None:
        with contextlib.suppress(OSError, ValueError):
            # The command has left its core dump; one of ddpcheck could take its place.
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):
            if status.signal not in {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(status.signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {status.signal})
            os.kill(os.getpid(), status.signal)
    # Also reached as process 1 of a container, which no signal of its own can end.
    sys.exit(status.returncode)


def _not_started(name: str, path: str, error: OSError) -> CommandNotStarted:
    if error.errno == errno.ENOENT:
        return CommandNotStarted(
            f"{name}: the interpreter named in the first line of {path} was not found", 126
        )
    return CommandNotStarted(f"{name}: cannot be started: {error.strerror}", 126)


def _not_found(name: str) -> str:
    if os.path.isfile(name) and os.sep not in name:
        kind = f"python {name}" if name.endswith(".py") else f"./{name}"
        return f"{name}: command not found; did you mean `{kind}`?"
    where = "no such file" if os.sep in name else "command not found"
    return f"{name}: {where}"


def _flush() -> None:
    # What ddpcheck printed before must not come out after what the command prints.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

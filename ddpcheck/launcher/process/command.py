"""Starts the user's command as a shell would, and exits with the same status or signal."""

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
from pathlib import Path
from typing import NoReturn

import ddpcheck
from ddpcheck.config import Config
from ddpcheck.errors import CommandNotStarted

# Not resolved: a rank removes exactly this entry from sys.path.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(ddpcheck.__file__)), "bootstrap")


def command_environment(config: Config, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environ` (default: of this process), with the bootstrap folder first on PYTHONPATH and the settings."""
    result = dict(os.environ if environ is None else environ)
    result["PYTHONPATH"] = prefixed_python_path(result.get("PYTHONPATH", ""))
    result.update(config.to_environment())
    return result


def prefixed_python_path(python_path: str, folder: str | Path = BOOTSTRAP) -> str:
    """`python_path` with `folder` first and only once, also for a run inside a run.

    An empty value means "no entries" and is dropped. An empty entry means "the current folder" and is kept.
    """
    if not python_path:
        return str(folder)
    entries = [entry for entry in python_path.split(os.pathsep) if entry != str(folder)]
    return os.pathsep.join([str(folder), *entries])


@dataclass(frozen=True)
class ExitStatus:
    """How the command ended."""

    returncode: int  # as in `$?`: 128 + N if signal N ended it
    signal: int | None = None
    interrupted: bool = False  # the user pressed Ctrl-C (or sent SIGINT) at least once
    stop_reason: str = ""  # why ddpcheck itself stopped the job, if it did

    @classmethod
    def from_wait(cls, status: int, *, interrupted: bool = False, stop_reason: str = "") -> ExitStatus:
        """From the status that `os.waitpid` returns."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return cls(128 + number, number, interrupted, stop_reason)
        return cls(os.WEXITSTATUS(status), None, interrupted, stop_reason)


def start(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start the command as a shell would and return its process id.

    It inherits the process group, terminal, open descriptors, signal mask and ignored signals (nohup) with which
    ddpcheck started, except for the signals that Python itself ignores.
    """
    path = find_program(command[0], environ.get("PATH", os.defpath))
    _flush()
    try:
        return _spawn(path, command, environ)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise _not_started(command[0], path, error) from error
    # A script without a #! line: shells and execvp run it with sh.
    return _spawn("/bin/sh", ["/bin/sh", path, *command[1:]], environ)


def _spawn(path: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
    # `cwd` has no effect except that subprocess does not use posix_spawn, with which glibc leaves two of its
    # internal signals ignored in the command and its children.
    process = subprocess.Popen(command, executable=path, env=environ, close_fds=False, cwd=os.curdir)
    process.returncode = 0  # the supervisor reaps the process; this suppresses Popen's warning
    return process.pid


def find_program(name: str, search_path: str) -> str:
    """The path of the program by the rules of a shell; raises with the status of a shell if there is none."""
    if os.sep in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder or os.curdir, name) for folder in search_path.split(os.pathsep)]
    blocked = ""
    for path in candidates:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
        # Folders on the search path are skipped. A folder given by its path is an error.
        if not blocked and (os.path.isfile(path) or (os.sep in name and os.path.isdir(path))):
            blocked = path
    if not blocked:
        raise CommandNotStarted(_not_found(name), 127)
    if os.path.isdir(blocked):
        raise CommandNotStarted(f"{name}: is a folder, not a command", 126)
    hint = f"run `chmod +x {blocked}`, or put its interpreter before it"
    raise CommandNotStarted(f"{name}: is not executable; {hint}", 126)


def exit_like(status: ExitStatus) -> NoReturn:
    """End this process with the exit status or the signal of the command.

    After Ctrl-C, a shell script continues or stops depending on whether the signal ended its command, so an exit
    with status 130 is not equivalent.
    """
    _flush()
    if status.signal is not None:
        with contextlib.suppress(OSError, ValueError):
            # A core dump of ddpcheck could overwrite the one of the command.
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):
            if status.signal not in {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(status.signal, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {status.signal})
            os.kill(os.getpid(), status.signal)
    # Also reached as process 1 of a container, which its own signals do not end.
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
    # The output of ddpcheck must precede the output of the command.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

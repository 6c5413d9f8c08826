"""Forks jobs from a process that has imported torch, which takes longer than most jobs of the tests.

A job under `ddpcheck run` must be a descendant of `ddpcheck run`, so a fork of the server becomes `ddpcheck run` by
exec, after it has itself forked the process that waits for the jobs of that command:

    server
      ddpcheck run ...               a fork of the server, after exec
        waits for jobs               forked before the exec, so it has torch
        fork_client.py job SCRIPT    started by ddpcheck run
        SCRIPT                       forked twice, so its parent is the process that adopts orphans: ddpcheck run
          ranks

`prepared` makes the command of a job, `prefix` is what to put before a command that contains one. Tests about
launchers, interpreters or imports do not use them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).with_name("fork_client.py")
START_SECONDS = 120.0
# How often the server looks whether the tests are still there.
PARENT_SECONDS = 5.0
# torch and its libraries read variables with these beginnings when they are imported.
READ_AT_IMPORT = ("LD_PRELOAD", "OMP_", "MKL_", "KMP_", "GOMP_", "PYTHON", "TORCH", "SIM_ACCELERATOR")
# As in fork_client.py, which imports nothing of the tests.
ENV_JOBS = "FORK_SERVER_JOBS"
_PR_SET_PDEATHSIG = 1

# In the tests


class _Server:
    """The server of this process, started at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        from tests.helpers.commands import environment

        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
                address = os.path.join(self._folder.name, "server")
                self._process = subprocess.Popen(
                    [sys.executable, __file__, address],
                    env=environment(),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
                atexit.register(self._stop)
                self._wait(address)
            return os.path.join(self._folder.name, "server")

    def _wait(self, address: str) -> None:
        until = time.monotonic() + START_SECONDS
        while not os.path.exists(address):
            assert self._process is not None
            assert self._process.poll() is None, "the fork server did not start"
            assert time.monotonic() < until, "the fork server did not start in time"
            time.sleep(0.05)

    def _stop(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


_SERVER = _Server()


def prepared(*script: object) -> tuple[object, ...]:
    """`python SCRIPT ARGUMENTS ...`, in a process that has imported torch if the command begins with `prefix`."""
    return (sys.executable, "-I", "-S", CLIENT, "job", *script)


def prefix(command: Sequence[object]) -> tuple[object, ...]:
    """What to put before a command; empty if it contains no job made by `prepared`."""
    if not any(str(CLIENT) in str(word) for word in command):
        return ()
    return (sys.executable, "-I", "-S", CLIENT, "run", _SERVER.address())


# In the server

_AT_IMPORT: dict[str, str] = {}


def serve(address: str) -> None:
    tests = os.getppid()
    # torch adds some by itself.
    _AT_IMPORT.update(_at_import(dict(os.environ)))
    _import_torch()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    number = 0
    # Not PR_SET_PDEATHSIG, which would end the server with the thread of the tests that started it.
    while os.getppid() == tests:
        if not select.select([listener], [], [], PARENT_SECONDS)[0]:
            continue
        connection, _ = listener.accept()
        number += 1
        if os.fork() == 0:
            listener.close()
            _in_fork(_run_command, connection, f"{address}.{number}")
        connection.close()


def _import_torch() -> None:
    import torch
    import torch._dynamo
    import torch.distributed.algorithms.model_averaging.averagers
    import torch.distributed.optim

    torch.set_num_threads(1)
    # A garbage collection writes to the objects it visits, and the kernel then copies them.
    gc.collect()
    gc.freeze()


def _in_fork(work: Any, *arguments: Any) -> NoReturn:
    """What a forked process does instead of returning."""
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _run_command(connection: socket.socket, jobs: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams = _receive(connection)
    pid = os.fork()
    if pid == 0:
        _in_fork(_become_command, request, streams, jobs)
    for stream in streams:
        os.close(stream)
    process = os.pidfd_open(pid)
    connection.sendall(b"%d\n" % pid)
    ready, _, _ = select.select([process, connection], [], [])
    if process not in ready:
        # The client was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        os.unlink(jobs)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % status)
    os._exit(0)


def _become_command(request: dict[str, Any], streams: list[int], jobs: str) -> None:
    os.setsid()
    _take(request, streams)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(jobs)
    listener.listen(16)
    command = os.getpid()
    if os.fork() == 0:
        _in_fork(_wait_for_jobs, listener, command)
    command_line = request["command"]
    # Python ignores these two.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, 4096)
    os.execvpe(command_line[0], command_line, {**request["environ"], ENV_JOBS: jobs})


def _wait_for_jobs(listener: socket.socket, command: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(command)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    _close_all_but(listener.fileno())
    while True:
        connection, _ = listener.accept()
        child = os.fork()
        if child == 0:
            listener.close()
            _in_fork(_start_job, connection)
        connection.close()
        os.waitpid(child, 0)


def _start_job(connection: socket.socket) -> None:
    request, streams = _receive(connection)
    if _at_import(request["environ"]) != _AT_IMPORT:
        connection.sendall(b"0\n")
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        # The parent ends now.
        _in_fork(_become_job, connection, request, streams)
    connection.sendall(b"%d\n" % pid)
    os._exit(0)


def _at_import(environ: dict[str, str]) -> dict[str, str]:
    # ddpcheck's folder on PYTHONPATH is no difference: see _arm.
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_IMPORT) and not (name == "PYTHONPATH" and _is_bootstrap(value))
    }


def _is_bootstrap(python_path: str) -> bool:
    return os.path.basename(python_path) == "bootstrap" and os.pathsep not in python_path


def _become_job(connection: socket.socket, request: dict[str, Any], streams: list[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take(request, streams)
    os.environ.clear()
    os.environ.update(request["environ"])
    # Ranks must not keep the connection open after this process.
    os.register_at_fork(after_in_child=connection.close)
    script, *arguments = request["command"]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    random.seed()
    # The folder of this job's TMPDIR, not the server's.
    tempfile.tempdir = None
    _arm()
    job = os.getpid()
    status = _run_script(script)
    # A process that the script forked ends here too.
    if os.getpid() == job:
        connection.sendall(b"%d\n" % status)
    os._exit(status)


def _arm() -> None:
    """As at the start of an interpreter under `ddpcheck run`: torch is imported, so this installs the agent."""
    folder = os.environ.get("PYTHONPATH", "")
    if _is_bootstrap(folder):
        sys.path.insert(0, folder)
        with contextlib.suppress(ModuleNotFoundError):
            runpy.run_path(os.path.join(folder, "sitecustomize.py"))


def _run_script(script: str) -> int:
    """Run a file as the interpreter does, with exit handlers."""
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    body, size = b"", int.from_bytes(head, "big")
    while len(body) < size:
        body += connection.recv(size - len(body))
    return json.loads(body), list(streams)


def _take(request: dict[str, Any], streams: list[int]) -> None:
    """Take over the streams, the namespaces, the folder and the umask of the client."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _enter_namespaces(request["pid"])
    os.chdir(request["cwd"])
    os.umask(request["umask"])


def _enter_namespaces(pid: int) -> None:
    """Those of the client: it may run on a host of a lab."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            descriptor = os.open(theirs, os.O_RDONLY)
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"setns {theirs}")
            os.close(descriptor)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)


def _end_with_parent(parent: int) -> None:
    """Be killed when the parent ends. Its own forks are not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])

"""Asks the fork server of the tests for processes that have imported torch; see `fork_server`.

    python -I -S fork_client.py run SOCKET COMMAND ...      a command, and beside it a process that waits for its jobs
    python -I -S fork_client.py job SCRIPT ARGUMENTS ...    as `python SCRIPT ARGUMENTS ...`, inside such a command

Both have the input, output, environment, folder, signals and exit status of what they stand for. Without a server, or
with variables that torch reads while it is imported, `job` starts an interpreter.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

# Address of the process that waits for the jobs of a command.
ENV_JOBS = "FORK_SERVER_JOBS"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def ask(address: str, request: dict[str, object]) -> tuple[socket.socket, int]:
    """The connection on which the status will arrive, and the id of the new process; 0 if it was refused."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(body)
    return connection, int(read_line(connection) or 0)


def read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            break
        line += part
    return line.decode().strip()


def request(command: list[str]) -> dict[str, object]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "pid": os.getpid(),
        "command": command,
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "umask": umask,
    }


def wait(connection: socket.socket, pid: int) -> int:
    """The status that the process reported: negative for a signal, 1 if it ended without a report."""
    for number in FORWARDED:
        signal.signal(number, lambda received, frame: os.kill(pid, received))
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return int(read_line(connection) or 1)
    while True:
        ready, _, _ = select.select([connection, process], [], [])
        if connection in ready or select.select([connection], [], [], 1.0)[0]:
            return int(read_line(connection) or 1)
        if process in ready:
            return 1


def leave(status: int) -> None:
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    kind, *command = sys.argv[1:]
    if kind == "run":
        leave(wait(*ask(command[0], request(command[1:]))))
    address = os.environ.pop(ENV_JOBS, "")
    connection, pid = ask(address, request(command)) if address else (None, 0)
    if connection is None or not pid:
        os.execv(sys.executable, [sys.executable, *command])
    leave(wait(connection, pid))


if __name__ == "__main__":
    main()

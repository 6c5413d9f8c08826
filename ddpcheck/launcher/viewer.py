"""Starts TensorBoard on a folder, says where it listens, and passes signals on to it."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from ddpcheck.errors import PortInUse, ViewerFailed
from ddpcheck.launcher.process.signals import SignalInbox

HOST = "localhost"
FIRST_PORT = 6006
# The charts of all ranks, as they were measured: TensorBoard would smooth them.
START = "#custom_scalars&_smoothingWeight=0"
_PORTS_TRIED = 100
_MOST_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


def free_port(asked: int | None) -> int:
    """The port that was asked for, or the first free one."""
    if asked is not None:
        why = _taken(asked)
        if why:
            raise PortInUse(f"port {asked} {why}: give another one with --port, or leave it out")
        return asked
    ports = range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED)
    found = next((port for port in ports if not _taken(port)), None)
    if found is None:
        raise PortInUse(f"the ports {ports[0]}-{ports[-1]} are all in use: give a free one with --port")
    return found


def _taken(port: int) -> str:
    """Why nobody can listen there; empty where one can."""
    for family, *_, address in socket.getaddrinfo(HOST, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As TensorBoard does: connections of its predecessor may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return "is in use"
                if error.errno == errno.EACCES:
                    return "may not be used by you"
    return ""


def show(events: Path, title: str, port: int) -> int:
    """Run TensorBoard until it is told to end; its exit status."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events)]
    command += ["--host", HOST, "--port", str(port), "--window_title", f"{title} - ddpcheck"]
    with tempfile.TemporaryFile() as said, SignalInbox() as inbox:
        # A session of its own: Ctrl-C comes to us, and reaches it once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            return _stand_by(process, inbox, said, title, port)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _stand_by(
    process: subprocess.Popen[bytes], inbox: SignalInbox, said: IO[bytes], title: str, port: int
) -> int:
    deadline = time.monotonic() + _MOST_SECONDS
    up = told_to_end = False
    while process.poll() is None:
        for number in inbox.wait(_LOOK_SECONDS):
            if number in _PASSED_ON:
                told_to_end = True
                process.send_signal(number)
        if not up and not told_to_end and _answers(port):
            up = True
            sys.stdout.write(f"TensorBoard shows {title} at http://{HOST}:{port}/{START} (Ctrl-C ends it)\n")
            sys.stdout.flush()
        if not up and time.monotonic() > deadline:
            raise ViewerFailed(f"TensorBoard did not come up within {_MOST_SECONDS:.0f} s{_last_words(said)}")
    # It was asked to end: however it did, that is what the user wanted.
    if told_to_end:
        return 0
    if not up:
        raise ViewerFailed(f"TensorBoard ended with status {process.returncode}{_last_words(said)}")
    return process.returncode


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""

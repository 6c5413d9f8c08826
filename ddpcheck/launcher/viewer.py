"""Runs TensorBoard on a folder, prints its address and forwards signals to it; waits while a server of ours runs."""

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
# Opens the charts of all ranks without the smoothing that TensorBoard applies by default.
CHARTS_FRAGMENT = "#custom_scalars&_smoothingWeight=0"
_PORTS_TRIED = 100
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


def free_port(requested: int | None) -> int:
    """The requested port, or the first free one."""
    if requested is not None:
        reason = _unusable(requested)
        if reason:
            raise PortInUse(f"port {requested} {reason}; choose another one with --port, or omit the option")
        return requested
    ports = range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED)
    free = next((port for port in ports if not _unusable(port)), None)
    if free is None:
        raise PortInUse(f"ports {ports[0]}-{ports[-1]} are all in use; choose a free one with --port")
    return free


def _unusable(port: int) -> str:
    """Why the port cannot be used; empty if it can."""
    for family, *_, address in socket.getaddrinfo(HOST, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As TensorBoard does: connections of an earlier instance may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return "is in use"
                if error.errno == errno.EACCES:
                    return "needs root permissions"
    return ""


def run_tensorboard(events: Path, title: str, port: int) -> int:
    """Run TensorBoard until it ends or a signal stops it; returns the exit status."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events)]
    command += ["--host", HOST, "--port", str(port), "--window_title", f"{title} - ddpcheck"]
    with tempfile.TemporaryFile() as errors, SignalInbox() as inbox:
        # In its own session: Ctrl-C reaches ddpcheck only, which forwards it once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return _wait(process, inbox, errors, title, port)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for_signal() -> None:
    """Until Ctrl-C, or a signal that asks to end."""
    with SignalInbox() as inbox:
        while not _FORWARDED.intersection(inbox.wait(_POLL_SECONDS)):
            pass


def _wait(
    process: subprocess.Popen[bytes], inbox: SignalInbox, errors: IO[bytes], title: str, port: int
) -> int:
    deadline = time.monotonic() + _START_SECONDS
    up = stopping = False
    while process.poll() is None:
        for number in inbox.wait(_POLL_SECONDS):
            if number in _FORWARDED:
                stopping = True
                process.send_signal(number)
        if not up and not stopping and _answers(port):
            up = True
            sys.stdout.write(
                f"TensorBoard shows {title} at http://{HOST}:{port}/{CHARTS_FRAGMENT} (press Ctrl-C to stop)\n"
            )
            sys.stdout.flush()
        if not up and time.monotonic() > deadline:
            raise ViewerFailed(f"TensorBoard did not start within {_START_SECONDS:.0f} s{_last_line(errors)}")
    # The user stopped it: its own exit status does not matter.
    if stopping:
        return 0
    if not up:
        raise ViewerFailed(f"TensorBoard exited with status {process.returncode}{_last_line(errors)}")
    return process.returncode


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=_POLL_SECONDS):
            return True
    except OSError:
        return False


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""

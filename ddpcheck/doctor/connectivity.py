"""Connection tests between hosts, at the addresses that gloo binds to."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddpcheck.doctor.context import ConnectionAttempt

_TIMEOUT_SECONDS = 3.0
_MAX_PARALLEL = 16
# Each host connects to at most this many others: with more hosts, not every pair is tried.
MAX_PEERS = 16


class Listener:
    """Accepts connections at one address and answers each with a random token."""

    def __init__(self, address: str) -> None:
        self._token = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self._address = address
        threading.Thread(target=self._accept, name="ddpcheck-doctor", daemon=True).start()

    def described(self) -> dict[str, Any]:
        return {"address": self._address, "port": self._server.getsockname()[1], "token": self._token}

    def close(self) -> None:
        # close() alone does not wake a thread that is blocked in accept().
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.sendall(self._token.encode())


def connect_to_others(me: str, others: Sequence[tuple[str, dict[str, Any]]]) -> list[ConnectionAttempt]:
    """Connect to `others`: host names with the descriptions of their listeners."""
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
        return list(pool.map(lambda other: _connect(me, *other), others))


def peers_of(me: int, hosts: int) -> list[int]:
    """Numbers of the hosts that follow `me`, wrapping around."""
    return [(me + step) % hosts for step in range(1, min(hosts, MAX_PEERS + 1))]


def _connect(me: str, other: str, listener: dict[str, Any]) -> ConnectionAttempt:
    address = str(listener["address"])
    return ConnectionAttempt(
        me, other, address, _failure(address, int(listener["port"]), str(listener["token"]))
    )


def _failure(address: str, port: int, token: str) -> str:
    """Why the connection failed; empty if it succeeded."""
    try:
        with socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS) as connection:
            answer = connection.recv(64).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    # The address may belong to another machine from here, such as 127.0.1.1.
    return "" if answer == token else "another process answers at that address"

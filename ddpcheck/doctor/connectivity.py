"""Hosts call each other at the addresses that gloo takes: who cannot be reached is known, not guessed."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddpcheck.doctor.context import ConnectionAttempt

_SECONDS = 3.0
_AT_ONCE = 16
# Each host calls those after it, up to so many: with more hosts not every pair is tried.
MOST_CALLED = 16


class Listener:
    """Takes calls at one address and answers each with a word of its own."""

    def __init__(self, address: str) -> None:
        self._word = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self._address = address
        threading.Thread(target=self._take, name="ddpcheck-doctor", daemon=True).start()

    def described(self) -> dict[str, Any]:
        return {"address": self._address, "port": self._server.getsockname()[1], "word": self._word}

    def close(self) -> None:
        # A thread that waits in accept would keep a socket that is only closed.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _take(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.sendall(self._word.encode())


def call_others(me: str, others: Sequence[tuple[str, dict[str, Any]]]) -> list[ConnectionAttempt]:
    """`others` are hosts and what their listeners said of themselves."""
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(lambda other: _call(me, *other), others))


def whom_to_call(me: int, hosts: int) -> list[int]:
    """The next ones, in a circle."""
    return [(me + step) % hosts for step in range(1, min(hosts, MOST_CALLED + 1))]


def _call(me: str, other: str, listener: dict[str, Any]) -> ConnectionAttempt:
    address = str(listener["address"])
    return ConnectionAttempt(
        me, other, address, _reason(address, int(listener["port"]), str(listener["word"]))
    )


def _reason(address: str, port: int, word: str) -> str:
    """Why the call did not come through; empty where it did."""
    try:
        with socket.create_connection((address, port), timeout=_SECONDS) as call:
            heard = call.recv(64).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    # The same address may belong to something else over here.
    return "" if heard == word else "somebody else answers at that address"

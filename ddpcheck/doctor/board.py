"""The job's own store, as ranks of the doctor use it: short waits, JSON, and nobody hangs for ever."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_PREFIX = "ddpcheck/doctor"
_POLL_SECONDS = 0.05


class CannotMeet(Exception):
    """There is no way to the store; the message says why."""


class Board:
    """What ranks lay down for each other."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        self._store.set(f"{_PREFIX}/{key}", zlib.compress(json.dumps(value).encode()))

    def take(self, key: str, until: float) -> Any:
        """None where it has not come by then, as a time of the monotonic clock."""
        name = f"{_PREFIX}/{key}"
        while not self._store.check([name]):
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_SECONDS)
        return json.loads(zlib.decompress(self._store.get(name)))

    def answer(self, key: str, seconds: float) -> bytes | None:
        """At once when it comes, for whoever measures time; None where it does not."""
        try:
            self._store.wait([f"{_PREFIX}/{key}"], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            return None
        return bytes(self._store.get(f"{_PREFIX}/{key}"))

    def say(self, key: str, value: bytes) -> None:
        self._store.set(f"{_PREFIX}/{key}", value)

    def count(self, key: str, more: int = 1) -> int:
        return int(self._store.add(f"{_PREFIX}/{key}", more))


def open_board(rank: int, seconds: float, environ: Mapping[str, str] = os.environ) -> Board:
    """Where the job's process group would meet: a server of the launcher's or of rank 0."""
    import torch

    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise CannotMeet("MASTER_ADDR and MASTER_PORT are not both set")
    of_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    distributed: Any = torch.distributed
    try:
        store = distributed.TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not of_launcher,
            timeout=timedelta(seconds=seconds),
            # A rank that is missing is to be named, not waited for.
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise CannotMeet(f"{host}:{port}: {_first_line(error)}") from error
    return Board(store)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")

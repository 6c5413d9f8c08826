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
# Often at first, seldom later: a thousand ranks may wait for a last one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class RendezvousFailed(Exception):
    """There is no way to the store; the message says why."""


class StoreClient:
    """What ranks lay down for each other."""

    def __init__(self, store: Any, attempt: str = "0") -> None:
        self._store = store
        # What ranks of an earlier attempt laid down may still be there.
        self._prefix = f"{_PREFIX}/{attempt}"

    def put(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", zlib.compress(json.dumps(value).encode()))

    def take(self, key: str, until: float) -> Any:
        """None where it has not come by then, as a time of the monotonic clock."""
        name = f"{self._prefix}/{key}"
        pause = _FIRST_PAUSE
        # Asked again and again: after a wait that timed out, stores of older versions of torch are of no more use.
        while not self._store.check([name]):
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        return json.loads(zlib.decompress(self._store.get(name)))

    def answer(self, key: str, seconds: float) -> bytes | None:
        """At once when it comes, for whoever measures time; None where it does not."""
        try:
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            return None
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def say(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def count(self, key: str, more: int = 1) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", more))


def open_store(rank: int, seconds: float, environ: Mapping[str, str] = os.environ) -> StoreClient:
    """Where the job's process group would meet: a server of the launcher's or of rank 0."""
    import torch

    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RendezvousFailed("MASTER_ADDR and MASTER_PORT are not both set")
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
        raise RendezvousFailed(f"{host}:{port}: {_first_line(error)}") from error
    return StoreClient(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")

"""Client of the job's own store: JSON values, and every wait has a limit."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_PREFIX = "ddpcheck/doctor"
# Exponential back-off: thousands of ranks may wait for the last one.
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 0.5


class RendezvousFailed(Exception):
    """The store cannot be reached; the message says why."""


class StoreClient:
    """Key-value store shared by all ranks of a job."""

    def __init__(self, store: Any, attempt: str = "0") -> None:
        self._store = store
        # Keys of an earlier attempt may still be in the store.
        self._prefix = f"{_PREFIX}/{attempt}"

    def put(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", zlib.compress(json.dumps(value).encode()))

    def wait_for(self, key: str, until: float) -> Any:
        """The value, or None if it is not set before `until`, a time of the monotonic clock."""
        name = f"{self._prefix}/{key}"
        pause = _FIRST_PAUSE
        # Poll: in older versions of torch a store is unusable after a wait that timed out.
        while not self._store.check([name]):
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)
        return json.loads(zlib.decompress(self._store.get(name)))

    def wait_for_bytes(self, key: str, seconds: float) -> bytes | None:
        """The raw value as soon as it is set, for clock measurements; None after `seconds`."""
        try:
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            return None
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def put_bytes(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", amount))


def open_store(rank: int, seconds: float, environ: Mapping[str, str] = os.environ) -> StoreClient:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, served by the launcher or by rank 0."""
    import torch

    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RendezvousFailed("MASTER_ADDR and MASTER_PORT are not both set")
    served_by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    distributed: Any = torch.distributed
    try:
        store = distributed.TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not served_by_launcher,
            timeout=timedelta(seconds=seconds),
            # Missing ranks are reported, not waited for.
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousFailed(f"{host}:{port}: {_first_line(error)}") from error
    return StoreClient(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")

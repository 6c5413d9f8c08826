"""Reads by cuFile, which can bring a file to a device past the host's memory: a call for each tensor, told as one.

Whether they went past it is for the figures to tell: where the file system cannot do it, cuFile reads by the host.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpcheck.privacy import mask_text
from ddpcheck.probes.process.device_memory import device_memory
from ddpcheck.probes.process.os_counters import reads, resident
from ddpcheck.records.schema import StartupRecord, StartupStage

if TYPE_CHECKING:
    from ddpcheck.agent.startup_tracer import Begun

VIA = "GdsFile.load_storage"
MOST_FILES = 256


@dataclass
class _File:
    """What was read of one file so far."""

    time: float
    seconds: float = 0.0
    bytes: int = 0
    read: int = 0
    storage: int = 0
    staged: int = 0
    moved: int = 0


class CufileReads:
    """Adds up the calls for each file until somebody takes them."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def add(self, begun: Begun, file: Any, storage: Any, on_device: bool) -> None:
        path = str(getattr(file, "filename", ""))
        if path not in self._files and len(self._files) >= MOST_FILES:
            return
        known = self._files.setdefault(path, _File(begun.time))
        now, size = reads(), int(storage.nbytes())
        known.seconds += time.monotonic() - begun.clock
        known.bytes += size
        known.read += now.asked - begun.reads.asked
        known.storage += now.storage - begun.reads.storage
        known.staged += max(0, resident().whole - begun.host)
        # The room on the device was there before: what counts is where the bytes went.
        known.moved += size if on_device else 0

    def take(self) -> list[StartupRecord]:
        """One record a file; what comes later of the same file begins anew."""
        files, self._files = self._files, {}
        return [_record(path, file) for path, file in files.items()]


def _record(path: str, file: _File) -> StartupRecord:
    return StartupRecord(
        stage=StartupStage.LOAD.value,
        time=round(file.time, 4),
        seconds=round(file.seconds, 4),
        via=VIA,
        bytes=file.bytes,
        files=[[mask_text(os.path.abspath(path)), file.bytes, "cufile"]],
        read=file.read,
        storage=file.storage,
        host=resident().whole,
        staged=file.staged,
        device=device_memory().allocated,
        moved=file.moved,
    )

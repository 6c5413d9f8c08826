"""Reads the tensors that ranks wrote down at a disagreement (safetensors files in the run folder)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LARGEST_HEADER = 64 << 20


class CapturedTensors:
    """One file of captured tensors; damaged or missing, it simply holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, Any] = {}
        self._data_at = 0
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size <= LARGEST_HEADER:
                    header = json.loads(file.read(size))
                    self._header = header if isinstance(header, dict) else {}
                    self._data_at = 8 + size
        except (OSError, ValueError, struct.error):
            self._header = {}

    def names(self) -> set[str]:
        return set(self._header)

    def note(self, name: str) -> str:
        """What the writer noted beside the tensors."""
        notes = self._header.get("__metadata__")
        return str(notes.get(name, "")) if isinstance(notes, dict) else ""

    def entries(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype in the format's own words, and shape of every tensor."""
        found = []
        for name, entry in self._header.items():
            match entry:
                case {"dtype": str(dtype), "shape": list(shape)} if all(isinstance(n, int) for n in shape):
                    found.append((name, dtype, shape))
        return found

    def read(self, name: str) -> bytes:
        """The raw bytes of a tensor, row by row; empty where it is not there."""
        match self._header.get(name):
            case {"data_offsets": [int(start), int(end)]} if 0 <= start <= end:
                with self._path.open("rb") as file:
                    # A damaged header may ask for more than there is memory.
                    there = max(file.seek(0, 2) - self._data_at, 0)
                    start, end = min(start, there), min(end, there)
                    file.seek(self._data_at + start)
                    return file.read(end - start)
        return b""

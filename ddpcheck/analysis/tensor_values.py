"""Decodes raw bytes of tensors, and finds the elements in which two tensors differ."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LARGEST_HEADER = 64 << 20


class CapturedTensors:
    """One file of captured tensors in safetensors format. A damaged or missing file is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, Any] = {}
        self._data_offset = 0
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size <= LARGEST_HEADER:
                    header = json.loads(file.read(size))
                    self._header = header if isinstance(header, dict) else {}
                    self._data_offset = 8 + size
        except (OSError, ValueError, struct.error):
            self._header = {}

    def names(self) -> set[str]:
        return set(self._header)

    def note(self, name: str) -> str:
        """An entry of the metadata."""
        notes = self._header.get("__metadata__")
        return str(notes.get(name, "")) if isinstance(notes, dict) else ""

    def entries(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype as safetensors names it, and shape of every tensor."""
        entries = []
        for name, entry in self._header.items():
            match entry:
                case {"dtype": str(dtype), "shape": list(shape)} if all(isinstance(n, int) for n in shape):
                    entries.append((name, dtype, shape))
        return entries

    def read(self, name: str) -> bytes:
        """The raw bytes of a tensor in row-major order; empty where the file does not contain it."""
        match self._header.get(name):
            case {"data_offsets": [int(start), int(end)]} if 0 <= start <= end:
                with self._path.open("rb") as file:
                    # The offsets of a damaged header may exceed the file.
                    size = max(file.seek(0, 2) - self._data_offset, 0)
                    start, end = min(start, size), min(end, size)
                    file.seek(self._data_offset + start)
                    return file.read(end - start)
        return b""


# By torch's name of a dtype: the format character of struct, and the size of an element.
_FORMATS = {
    "float64": ("d", 8),
    "float32": ("f", 4),
    "float16": ("e", 2),
    "int64": ("q", 8),
    "int32": ("i", 4),
    "int16": ("h", 2),
    "int8": ("b", 1),
    "uint8": ("B", 1),
    "bool": ("?", 1),
}
_SIZES = {"bfloat16": 2, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}


def element_size(dtype: str) -> int:
    """Bytes of one element; 1 for an unknown dtype, which is then compared byte by byte."""
    return _FORMATS[dtype][1] if dtype in _FORMATS else _SIZES.get(dtype, 1)


def value(data: bytes, dtype: str) -> Any:
    """One element as a number; as hexadecimal text where Python has no equivalent of its dtype."""
    if dtype in _FORMATS and len(data) == _FORMATS[dtype][1]:
        return struct.unpack("<" + _FORMATS[dtype][0], data)[0]
    if dtype == "bfloat16" and len(data) == 2:
        return struct.unpack("<f", b"\0\0" + data)[0]
    if dtype == "complex64" and len(data) == 8:
        return str(complex(*struct.unpack("<ff", data)))
    if dtype == "complex128" and len(data) == 16:
        return str(complex(*struct.unpack("<dd", data)))
    return "0x" + data[::-1].hex()


def differing_elements(first: bytes, second: bytes, size: int, most: int) -> tuple[int, list[int]]:
    """The number of differing elements of two tensors, and the flat indices of the first `most`."""
    count = 0
    indices: list[int] = []
    length = min(len(first), len(second))
    # Compare large blocks first: most are equal.
    block = 4096 * size
    for start in range(0, length, block):
        end = min(start + block, length)
        a, b = first[start:end], second[start:end]
        if a == b:
            continue
        for offset in range(0, len(a), size):
            if a[offset : offset + size] != b[offset : offset + size]:
                count += 1
                if len(indices) < most:
                    indices.append((start + offset) // size)
    return count, indices


def unravel_index(flat: int, shape: list[int]) -> list[int]:
    """The index in each dimension of the element at a flat index in row-major order."""
    index: list[int] = []
    for extent in reversed(shape):
        index.append(flat % extent if extent else 0)
        flat //= extent or 1
    return index[::-1]

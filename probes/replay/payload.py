"""What a rank hands over for a replay: values and tensors in one safetensors file, without pickle.

The bits of a result depend on the strides of the operands and on their addresses modulo the width of vector registers,
so tensors are stored as spans of memory and rebuilt with the same strides and alignment.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpcheck.probes.live_compare.tensor_dump import NAMES, tensor_bytes, write_safetensors

# The largest micro-batch that is handed over, with the buffers and the gradients of the outputs.
MAX_BYTES = 1 << 30
# Addresses are kept modulo this: no vector register or cache line is wider.
ALIGNMENT = 64
# Sizes of the header that are read at all: the file may be damaged.
_MAX_HEADER = 64 << 20
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
DTYPES = {str(dtype): dtype for dtype in NAMES}


class NotPortableError(Exception):
    """A value that cannot be handed over without pickle."""


class TooLargeError(Exception):
    """The tensors exceed MAX_BYTES."""


class TensorSpan:
    """A copy of the memory that a tensor covers, with what is needed to build the tensor again."""

    __slots__ = ("alignment", "data", "requires_grad", "shape", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        if (
            type(tensor) not in _PLAIN_TYPES
            or tensor.layout is not torch.strided
            or tensor.dtype not in NAMES
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.device.type == "meta"
        ):
            raise NotPortableError(f"a tensor of type {type(tensor).__name__}")
        size = extent(tensor.shape, tensor.stride())
        if size * tensor.element_size() > MAX_BYTES:
            raise TooLargeError
        self.shape, self.strides = list(tensor.shape), list(tensor.stride())
        self.requires_grad = tensor.requires_grad
        self.alignment = tensor.data_ptr() % ALIGNMENT
        self.data = tensor.detach().as_strided((size,), (1,), tensor.storage_offset()).clone()

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def to_row(self) -> list[Any]:
        return [self.shape, self.strides, self.alignment, self.requires_grad, str(self.data.device)]


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements between the first and the last one of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def aligned(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    alignment: int,
) -> torch.Tensor:
    """An uninitialised tensor whose address has the same remainder as the original."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    size, spare = extent(shape, strides), ALIGNMENT // itemsize
    base = torch.empty(size + spare, dtype=dtype, device=device)
    missing = (alignment - base.data_ptr()) % ALIGNMENT
    offset = missing // itemsize if missing % itemsize == 0 else 0
    # Not a view: a forward may write to an input in place.
    return torch.empty(0, dtype=dtype, device=device).set_(
        base.untyped_storage(), offset, list(shape), list(strides)
    )


def aligned_copy(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """A copy with the same strides, and the given alignment."""
    copy = aligned(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, alignment)
    _flat(copy).copy_(_flat(tensor.detach()))
    return copy


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor covers."""
    return tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())


class Packer:
    """Encodes values as JSON and collects their tensors. A tensor that occurs twice is stored once."""

    def __init__(self) -> None:
        self.spans: list[TensorSpan] = []
        self._indices: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def tensor(self, tensor: torch.Tensor) -> int:
        """The index of a copy of `tensor`."""
        known = self._indices.get(id(tensor))
        if known is not None:
            return known
        self.spans.append(TensorSpan(tensor))
        if self.nbytes > MAX_BYTES:
            raise TooLargeError
        # An id is unique only while its tensor exists.
        self._kept.append(tensor)
        self._indices[id(tensor)] = len(self.spans) - 1
        return len(self.spans) - 1

    def release(self) -> None:
        """The tensors of the program are not needed any more."""
        self._indices.clear()
        self._kept.clear()

    def value(self, value: Any) -> list[Any]:
        """A tag and the encoded value; NotPortableError for types other than these."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return ["value", value]
        if kind is float:
            return ["float", value.hex()]
        if isinstance(value, torch.Tensor):
            return ["tensor", self.tensor(value)]
        if kind in (list, tuple, torch.Size):
            return [_SEQUENCES[kind], [self.value(each) for each in value]]
        if kind is dict and all(type(key) in (str, int) for key in value):
            return ["dict", [[key, self.value(each)] for key, each in value.items()]]
        if kind is torch.dtype and str(value) in DTYPES:
            return ["dtype", str(value)]
        if kind is torch.device:
            return ["device", str(value)]
        raise NotPortableError(f"a value of type {kind.__name__}")


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}


def unpack(encoded: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `Packer.value` encoded; ValueError if it is damaged."""
    match encoded:
        case ["value", value]:
            return value
        case ["float", str(text)]:
            return float.fromhex(text)
        case ["tensor", int(index)] if 0 <= index < len(tensors):
            return tensors[index]
        case ["list", list(rows)]:
            return [unpack(row, tensors) for row in rows]
        case ["tuple", list(rows)]:
            return tuple(unpack(row, tensors) for row in rows)
        case ["size", list(rows)]:
            return torch.Size(unpack(row, tensors) for row in rows)
        case ["dict", list(rows)]:
            return {key: unpack(row, tensors) for key, row in rows}
        case ["dtype", str(name)] if name in DTYPES:
            return DTYPES[name]
        case ["device", str(name)]:
            return torch.device(name)
    raise ValueError("not an encoded value")


def write_payload(path: Path, packer: Packer, content: Mapping[str, Any]) -> int:
    """Write everything or nothing; returns the size. On a GPU this waits for the device."""
    rows = [span.to_row() for span in packer.spans]
    text = json.dumps({"content": content, "tensors": rows}, separators=(",", ":"))
    tensors = {
        str(index): (span.data.dtype, [span.data.numel()], tensor_bytes(span.data))
        for index, span in enumerate(packer.spans)
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_safetensors(temporary, tensors, {"audit": text})
        size = temporary.stat().st_size
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read_payload(path: Path, device: torch.device) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The content and the tensors of a file: those of a device on `device`. ValueError if it is damaged."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER:
            raise ValueError("the header is empty or too long")
        header = json.loads(file.read(size))
        described = json.loads(header["__metadata__"]["audit"])
        dtypes = {text: dtype for dtype, text in NAMES.items()}
        tensors: list[torch.Tensor] = []
        for index, row in enumerate(described["tensors"]):
            shape, strides, alignment, requires_grad, device_name = row
            of_file = header[str(index)]
            dtype = dtypes[of_file["dtype"]]
            first, last = of_file["data_offsets"]
            itemsize = torch.empty(0, dtype=dtype).element_size()
            if extent(shape, strides) * itemsize != last - first or last - first > MAX_BYTES:
                raise ValueError("a tensor has another size than its strides say")
            on_host = torch.device(device_name).type == "cpu"
            tensor = aligned(shape, strides, dtype, torch.device("cpu"), alignment)
            if last > first:
                target = (ctypes.c_char * (last - first)).from_address(tensor.data_ptr())
                file.seek(8 + size + first)
                if file.readinto(target) != last - first:
                    raise ValueError("the file is truncated")
            if not on_host:
                copy = aligned(shape, strides, dtype, device, alignment)
                _flat(copy).copy_(_flat(tensor))
                tensor = copy
            tensors.append(tensor.requires_grad_(bool(requires_grad)))
    return described["content"], tensors

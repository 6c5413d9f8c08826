"""Writes tensors in the safetensors format: a length, a JSON header, raw bytes; no pickle, no library."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.probes.digest import plain_memory
from ddpcheck.records.kinds.digests import TensorKind

if TYPE_CHECKING:
    from ddpcheck.probes.live_compare.snapshot import SnapshotKey
    from ddpcheck.probes.probe import ProbeContext


# The format's own names; a dtype it does not know cannot be written.
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
for _name, _text in (("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")):
    if hasattr(torch, _name):
        NAMES[getattr(torch, _name)] = _text


def writable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What to write of `tensor`; None where the format does not know its kind, or there is no memory behind it."""
    if tensor is None or tensor.dtype not in NAMES or tensor.layout != torch.strided:
        return None
    memory = plain_memory(tensor)
    return None if memory is None else memory.detach()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements row by row. On a GPU this waits for the device."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, list[int], bytes]],
    about: Mapping[str, str] | None = None,
) -> None:
    """`tensors`: by name the dtype, the shape and the bytes; `about` goes where the format keeps notes."""
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


BUDGET = 16 << 20
FOLDER = "captures"


def dump_tensors(
    context: ProbeContext, moment: SnapshotKey, places: list[int]
) -> tuple[str, list[int], list[int]]:
    """Write the tensors at `places`; returns the file's name and which were written whole or cut."""
    tracked = moment.tracked
    slots = tracked.buffers if moment.of is TensorKind.BUFFERS else tracked.parameters
    tensors: list[torch.Tensor | None] = list(tracked.tensors(slots))
    if moment.of is TensorKind.GRADIENTS:
        tensors = [tensor.grad if tensor is not None else None for tensor in tensors]
    parts: dict[str, tuple[torch.dtype, list[int], bytes]] = {}
    whole: list[int] = []
    cut: list[int] = []
    room = BUDGET
    for place in places:
        tensor = writable(tensors[place])
        if tensor is None or room <= 0:
            continue
        shape, data = _within(tensor, room)
        (whole if shape == list(tensor.shape) else cut).append(place)
        parts[slots[place].name] = (tensor.dtype, shape, data)
        room -= len(data)
    name = f"{FOLDER}/rank-{context.rank:05d}-{context.session[:8]}-{_file_stem(moment)}.safetensors"
    # On a GPU this waits for the device, once, in a job that is already known to be broken.
    write_safetensors(Path(context.config.run_dir) / name, parts)
    return name, whole, cut


def _file_stem(moment: SnapshotKey) -> str:
    """All that tells moments apart: a file must not be overwritten by that of another one."""
    parts = [f"m{moment.tracked.index}", moment.stage.value, moment.of.value, str(moment.step)]
    if moment.optimizer is not None:
        parts.append(f"o{moment.optimizer}")
    return "-".join(parts)


def _within(tensor: torch.Tensor, room: int) -> tuple[list[int], bytes]:
    """The tensor, or as much of its beginning as there is room for."""
    most = room // tensor.element_size()
    if tensor.numel() <= most:
        return list(tensor.shape), tensor_bytes(tensor)
    return [most], tensor_bytes(tensor.flatten()[:most])

"""Writes full tensors of a disagreeing moment to a safetensors file, within a fixed budget."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.records.schema import Of

if TYPE_CHECKING:
    from ddpcheck.probes.looks import Moment
    from ddpcheck.probes.probe import Scene

BUDGET = 16 << 20
FOLDER = "captures"

# The safetensors format's own names; a dtype it does not know is left out.
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


def write_capture(scene: Scene, moment: Moment, places: list[int]) -> tuple[str, list[int], list[int]]:
    """Write the tensors at `places`; returns the file's name and which were written whole or cut."""
    watched = moment.watched
    slots = watched.buffers if moment.of is Of.BUFFERS else watched.parameters
    tensors = watched.tensors(slots)
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    whole: list[int] = []
    cut: list[int] = []
    offset = 0
    for place in places:
        tensor = tensors[place].detach()
        if tensor.dtype not in NAMES or tensor.layout != torch.strided or offset >= BUDGET:
            continue
        data, shape, complete = _bytes(tensor, BUDGET - offset)
        (whole if complete else cut).append(place)
        header[slots[place].name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    name = f"{FOLDER}/rank-{scene.rank:05d}-{scene.session[:8]}-{_name(moment)}.safetensors"
    _write(Path(scene.config.run_dir) / name, header, parts)
    return name, whole, cut


def _name(moment: Moment) -> str:
    """All that tells moments apart: a file must not be overwritten by that of another one."""
    parts = [f"m{moment.watched.index}", moment.stage.value, moment.of.value, str(moment.step)]
    if moment.optimizer is not None:
        parts.append(f"o{moment.optimizer}")
    return "-".join(parts)


def _bytes(tensor: torch.Tensor, room: int) -> tuple[bytes, list[int], bool]:
    most = room // tensor.element_size()
    shape, complete = list(tensor.shape), True
    if tensor.numel() > most:
        tensor = tensor.flatten()[:most]
        shape, complete = [most], False
    # On a GPU this waits for the device, once, in a job that is already known to be broken.
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b"", shape, complete


def _write(path: Path, header: dict[str, Any], parts: list[bytes]) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)

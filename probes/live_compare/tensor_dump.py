"""Writes whole tensors as safetensors: those of a mismatch, and the gradients of chosen steps."""

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
from ddpcheck.step_ranges import StepRanges, parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.probes.live_compare.node import SnapshotKey
    from ddpcheck.probes.probe import ProbeContext


# Bytes per file.
BUDGET = 16 << 20
FOLDER = "captures"
# The format's own names; other dtypes cannot be written.
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
    """What to write of `tensor`; None if the format does not support it, or it has no memory."""
    if tensor is None or tensor.dtype not in NAMES or tensor.layout != torch.strided:
        return None
    memory = plain_memory(tensor)
    return None if memory is None else memory.detach()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order. On a GPU this waits for the device."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, list[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """`tensors`: dtype, shape and bytes by name; `metadata` goes into the header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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


def dump_tensors(
    context: ProbeContext, key: SnapshotKey, indices: list[int]
) -> tuple[str, list[int], list[int]]:
    """Write the tensors at `indices`; returns the file's name and which were written completely or truncated."""
    tracked = key.tracked
    slots = tracked.buffers if key.of is TensorKind.BUFFERS else tracked.parameters
    tensors: list[torch.Tensor | None] = list(tracked.tensors(slots))
    if key.of is TensorKind.GRADIENTS:
        tensors = [tensor.grad if tensor is not None else None for tensor in tensors]
    parts: dict[str, tuple[torch.dtype, list[int], bytes]] = {}
    complete: list[int] = []
    truncated: list[int] = []
    budget = BUDGET
    for index in indices:
        tensor = writable(tensors[index])
        if tensor is None or budget <= 0:
            continue
        shape, data = _within(tensor, budget)
        (complete if shape == list(tensor.shape) else truncated).append(index)
        parts[slots[index].name] = (tensor.dtype, shape, data)
        budget -= len(data)
    name = f"{FOLDER}/rank-{context.rank:05d}-{context.session[:8]}-{_file_stem(key)}.safetensors"
    # On a GPU this waits for the device, once, in a job that is already known to be broken.
    write_safetensors(Path(context.config.run_dir) / name, parts)
    return name, complete, truncated


def _file_stem(key: SnapshotKey) -> str:
    """Everything that distinguishes snapshots: one file must not overwrite that of another snapshot."""
    parts = [f"m{key.tracked.index}", key.stage.value, key.of.value, str(key.step)]
    if key.optimizer is not None:
        parts.append(f"o{key.optimizer}")
    return "-".join(parts)


def _within(tensor: torch.Tensor, budget: int) -> tuple[list[int], bytes]:
    """The tensor, or as many of its first elements as fit into `budget` bytes."""
    count = budget // tensor.element_size()
    if tensor.numel() <= count:
        return list(tensor.shape), tensor_bytes(tensor)
    return [count], tensor_bytes(tensor.flatten()[:count])


GRADIENTS_FOLDER = "gradients"


class GradientFiles:
    """One file per launch, rank, module and step; nothing is kept for other steps."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        every = context.config.gradients == "full"
        # None: no step, as in most runs.
        self._steps = (
            StepRanges(((0, None),)) if every else parse_steps(context.config.save_gradients)
        ) or None
        self._local: dict[int, dict[int, torch.Tensor]] = {}
        self._before: dict[int, dict[str, torch.Tensor]] = {}

    def wants(self, step: int) -> bool:
        """Whether the gradients of this step are saved."""
        return self._steps is not None and step in self._steps

    def keep_local(self, tracked: TrackedModule, step: int, index: int, gradient: torch.Tensor) -> None:
        """A copy: the reducer is about to overwrite it with the mean."""
        if self.wants(step):
            self._local.setdefault(tracked.index, {})[index] = gradient.detach().clone()

    def write(self, tracked: TrackedModule, step: int, gradients: list[torch.Tensor | None]) -> None:
        local = self._local.pop(tracked.index, {})
        if not self.wants(step):
            return
        tensors: dict[str, torch.Tensor] = {}
        for index, slot in enumerate(tracked.parameters):
            reduced = gradients[index]
            if index in local:
                tensors[f"local/{slot.name}"] = local[index]
            if reduced is not None:
                tensors[f"reduced/{slot.name}"] = reduced.detach()
        self._write(tracked, step, "", tensors)

    def keep_parameters(self, tracked: TrackedModule, step: int) -> None:
        """Copies the parameters before the step that applies these gradients."""
        if self._steps is not None and step in self._steps:
            self._before[tracked.index] = {
                f"before/{slot.name}": slot.holder[slot.key].detach().clone() for slot in tracked.parameters
            }

    def write_parameters(self, tracked: TrackedModule, step: int) -> None:
        if not self._before:
            return
        before = self._before.pop(tracked.index, None)
        if before is not None:
            after = {f"after/{slot.name}": slot.holder[slot.key].detach() for slot in tracked.parameters}
            self._write(tracked, step, "-parameters", {**before, **after})

    def _write(self, tracked: TrackedModule, step: int, what: str, tensors: dict[str, torch.Tensor]) -> None:
        # The begin of the session id prevents that a restart overwrites the files of an earlier launch.
        start = self._context.session[:8]
        name = (
            f"step-{step:08d}-module-{tracked.index}-rank-{self._context.rank:05d}-{start}{what}.safetensors"
        )
        rows = {
            key: (tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
            for key, saved in tensors.items()
            if (tensor := writable(saved)) is not None
        }
        # The ranks whose gradients form the mean: without it a missing file would go unnoticed.
        metadata = {"group": ",".join(map(str, tracked.group))}
        write_safetensors(Path(self._context.config.run_dir) / GRADIENTS_FOLDER / name, rows, metadata)

"""Writes full tensors of a disagreeing moment to a file, within a fixed budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.tensor_dump import tensor_bytes, writable, write_safetensors
from ddpcheck.records.schema import Of

if TYPE_CHECKING:
    from ddpcheck.probes.live_compare.snapshot import Moment
    from ddpcheck.probes.probe import Scene

BUDGET = 16 << 20
FOLDER = "captures"


def write_capture(scene: Scene, moment: Moment, places: list[int]) -> tuple[str, list[int], list[int]]:
    """Write the tensors at `places`; returns the file's name and which were written whole or cut."""
    watched = moment.watched
    slots = watched.buffers if moment.of is Of.BUFFERS else watched.parameters
    tensors: list[torch.Tensor | None] = list(watched.tensors(slots))
    if moment.of is Of.GRADIENTS:
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
    name = f"{FOLDER}/rank-{scene.rank:05d}-{scene.session[:8]}-{_name(moment)}.safetensors"
    # On a GPU this waits for the device, once, in a job that is already known to be broken.
    write_safetensors(Path(scene.config.run_dir) / name, parts)
    return name, whole, cut


def _name(moment: Moment) -> str:
    """All that tells moments apart: a file must not be overwritten by that of another one."""
    parts = [f"m{moment.watched.index}", moment.stage.value, moment.of.value, str(moment.step)]
    if moment.optimizer is not None:
        parts.append(f"o{moment.optimizer}")
    return "-".join(parts)


def _within(tensor: torch.Tensor, room: int) -> tuple[list[int], bytes]:
    """The tensor, or as much of its beginning as there is room for."""
    most = room // tensor.element_size()
    if tensor.numel() <= most:
        return list(tensor.shape), tensor_bytes(tensor)
    return [most], tensor_bytes(tensor.flatten()[:most])

"""Keeps the full gradients of chosen steps, before and after the reduction, as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.safetensors_file import NAMES, tensor_bytes, write_safetensors
from ddpcheck.step_ranges import StepRanges, parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.watched_module import WatchedModule
    from ddpcheck.probes.probe import Scene

FOLDER = "gradients"


class GradientFiles:
    """One file a rank, module and step; nothing is kept for steps that were not asked for."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        every = scene.config.gradients == "full"
        self._steps = StepRanges(((0, None),)) if every else parse_steps(scene.config.save_gradients)
        self._local: dict[int, dict[int, torch.Tensor]] = {}

    def keep_local(self, watched: WatchedModule, step: int, place: int, gradient: torch.Tensor) -> None:
        """A copy: the reducer is about to write the mean over it."""
        if self._steps and step in self._steps and gradient.layout == torch.strided:
            self._local.setdefault(watched.index, {})[place] = gradient.detach().clone()

    def write(self, watched: WatchedModule, step: int, gradients: list[torch.Tensor | None]) -> None:
        local = self._local.pop(watched.index, {})
        if not self._steps or step not in self._steps:
            return
        tensors: dict[str, torch.Tensor] = {}
        for place, slot in enumerate(watched.parameters):
            reduced = gradients[place]
            if place in local:
                tensors[f"local/{slot.name}"] = local[place]
            if reduced is not None and reduced.layout == torch.strided:
                tensors[f"reduced/{slot.name}"] = reduced.detach()
        rows = {name: tensor for name, tensor in tensors.items() if tensor.dtype in NAMES}
        path = gradient_file(Path(self._scene.config.run_dir), self._scene.rank, watched.index, step)
        write_safetensors(path, {name: (t.dtype, list(t.shape), tensor_bytes(t)) for name, t in rows.items()})


def gradient_file(run_dir: Path, rank: int, module: int, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08d}-module-{module}-rank-{rank:05d}.safetensors"

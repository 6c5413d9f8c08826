"""Saves the full gradients of selected steps, before and after the reduction, as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.tensor_dump import tensor_bytes, writable, write_safetensors
from ddpcheck.step_ranges import StepRanges, parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.probes.probe import ProbeContext

FOLDER = "gradients"


class GradientFiles:
    """One file per launch, rank, module and step; nothing is kept for other steps."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        every = context.config.gradients == "full"
        self._steps = StepRanges(((0, None),)) if every else parse_steps(context.config.save_gradients)
        self._local: dict[int, dict[int, torch.Tensor]] = {}
        self._before: dict[int, dict[str, torch.Tensor]] = {}

    def keep_local(self, tracked: TrackedModule, step: int, index: int, gradient: torch.Tensor) -> None:
        """A copy: the reducer is about to overwrite it with the mean."""
        if self._steps and step in self._steps:
            self._local.setdefault(tracked.index, {})[index] = gradient.detach().clone()

    def write(self, tracked: TrackedModule, step: int, gradients: list[torch.Tensor | None]) -> None:
        local = self._local.pop(tracked.index, {})
        if not self._steps or step not in self._steps:
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
        if self._steps and step in self._steps:
            self._before[tracked.index] = {
                f"before/{slot.name}": slot.holder[slot.key].detach().clone() for slot in tracked.parameters
            }

    def write_parameters(self, tracked: TrackedModule, step: int) -> None:
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
        write_safetensors(Path(self._context.config.run_dir) / FOLDER / name, rows, metadata)

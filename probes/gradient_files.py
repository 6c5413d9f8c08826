"""Keeps the full gradients of chosen steps, before and after the reduction, as safetensors."""

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
    """One file an attempt, rank, module and step; nothing is kept for steps that were not asked for."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        every = context.config.gradients == "full"
        self._steps = StepRanges(((0, None),)) if every else parse_steps(context.config.save_gradients)
        self._local: dict[int, dict[int, torch.Tensor]] = {}
        self._before: dict[int, dict[str, torch.Tensor]] = {}

    def keep_local(self, tracked: TrackedModule, step: int, place: int, gradient: torch.Tensor) -> None:
        """A copy: the reducer is about to write the mean over it."""
        if self._steps and step in self._steps:
            self._local.setdefault(tracked.index, {})[place] = gradient.detach().clone()

    def write(self, tracked: TrackedModule, step: int, gradients: list[torch.Tensor | None]) -> None:
        local = self._local.pop(tracked.index, {})
        if not self._steps or step not in self._steps:
            return
        tensors: dict[str, torch.Tensor] = {}
        for place, slot in enumerate(tracked.parameters):
            reduced = gradients[place]
            if place in local:
                tensors[f"local/{slot.name}"] = local[place]
            if reduced is not None:
                tensors[f"reduced/{slot.name}"] = reduced.detach()
        self._write(tracked, step, "", tensors)

    def keep_parameters(self, tracked: TrackedModule, step: int) -> None:
        """How the parameters stand before the step that applies these gradients."""
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
        # The start of the session keeps a restart from writing over what the attempt before it has left.
        start = self._context.session[:8]
        name = (
            f"step-{step:08d}-module-{tracked.index}-rank-{self._context.rank:05d}-{start}{what}.safetensors"
        )
        rows = {
            key: (tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
            for key, whole in tensors.items()
            if (tensor := writable(whole)) is not None
        }
        # Whose gradients make up the mean: without it a missing file would go unnoticed.
        about = {"group": ",".join(map(str, tracked.group))}
        write_safetensors(Path(self._context.config.run_dir) / FOLDER / name, rows, about)

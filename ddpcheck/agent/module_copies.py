"""Recognises modules outside of DDP whose values come from a DDP module: copies of it, and moving averages.

A few elements of both are kept for some steps. They are compared on the host, at once only if they are there already.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from ddpcheck.agent.tracked_module import TrackedModule
from ddpcheck.records.kinds.modules import UseEvidence

# Steps whose values are kept, tensors of a module, and elements of a tensor.
MAX_SAMPLES = 64
_TENSORS = 6
_ELEMENTS = 4
# Updates that have to fit, elements that have to differ in each, and the relative error of one in float32.
_FEWEST_UPDATES = 2
_FEWEST_ELEMENTS = 4
_TOLERANCE = 1e-2
_ROUNDING = 2.0**-22


class ModuleCopy:
    """Samples of a module and of the DDP module with the same parameters, after each step."""

    def __init__(self, copy: TrackedModule, original: TrackedModule) -> None:
        self._copy, self._original = copy, original
        names = [slot.name for slot in original.parameters]
        # The largest ones: vectors may be zero at first.
        largest = sorted(
            zip(range(len(copy.parameters)), copy.parameter_tensors(), strict=True),
            key=lambda item: (-item[1].dim(), item[0]),
        )[:_TENSORS]
        self._indices = [index for index, _ in largest]
        self._originals = [names.index(copy.parameters[index].name) for index in self._indices]
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ended = False

    @property
    def full(self) -> bool:
        return self._ended or len(self._samples) >= MAX_SAMPLES

    def end(self) -> None:
        """The module was deleted. What is known of it is evaluated when the job ends."""
        self._ended = True

    def sample(self) -> None:
        """Called after a step: the module has not followed it yet."""
        copies, originals = self._copy.parameter_tensors(), self._original.parameter_tensors()
        self._samples.append(
            (
                _elements(copies[index] for index in self._indices),
                _elements(originals[index] for index in self._originals),
            )
        )

    def evidence(self) -> UseEvidence | None:
        """How the module has changed; None if it has not, or in another way. Waits for a device."""
        samples = [(copy.double().cpu(), original.double().cpu()) for copy, original in self._samples]
        followed = 0
        for number, ((before, source), (after, _)) in enumerate(pairwise(samples), 1):
            if torch.equal(before, after):
                continue
            if any(torch.equal(after, original) for _, original in samples[:number]):
                return UseEvidence.COPIED
            if not _is_between(before, source, after):
                return None
            followed += 1
        return UseEvidence.FOLLOWS if followed >= _FEWEST_UPDATES else None


def find_copy(tracked: TrackedModule, wrapped: Iterable[TrackedModule]) -> ModuleCopy | None:
    """None if no DDP module has all parameters of the module, with the same names and shapes."""
    shapes = _shapes(tracked)
    for original in wrapped:
        known = _shapes(original)
        if shapes and all(known.get(name) == shape for name, shape in shapes.items()):
            return ModuleCopy(tracked, original)
    return None


def _shapes(tracked: TrackedModule) -> dict[str, tuple[int, ...]]:
    tensors = tracked.parameter_tensors()
    return {slot.name: tuple(tensor.shape) for slot, tensor in zip(tracked.parameters, tensors, strict=True)}


def _elements(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The first elements of each tensor, as a new tensor on their device."""
    parts = []
    for tensor in tensors:
        row = tensor.detach()
        while row.dim() > 1:
            row = row[0]
        parts.append(row.reshape(-1)[:_ELEMENTS].float())
    return torch.cat(parts)


def _is_between(before: torch.Tensor, source: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether all elements have come closer to `source` by the same share of the distance."""
    distance, change = source - before, after - before
    rounding = _ROUNDING * torch.maximum(before.abs(), source.abs())
    counted = distance.abs() * _TOLERANCE > rounding
    if int(counted.sum()) < _FEWEST_ELEMENTS:
        return False
    share = float((change * distance)[counted].sum() / distance[counted].square().sum())
    error = (change - share * distance).abs()
    return 0.0 < share < 1.0 and bool(
        (error <= _TOLERANCE * share * distance.abs() + rounding)[counted].all()
    )

"""Sketches of many tensors, taken as they come: at once on the CPU, fetched together from a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddpcheck.probes.sketches.sketch import Sketch, can_sketch, sketch, sketch_where_it_lies

if TYPE_CHECKING:
    from ddpcheck.probes.digest import Reading
    from ddpcheck.probes.sketches.batch import DevicePage


def can_keep(tensor: torch.Tensor) -> bool:
    """Not what is sparse on a device: how many entries it has could only be known by waiting."""
    return can_sketch(tensor) and (tensor.is_cpu or not tensor.is_sparse)


class SketchBook:
    """Never waits for a device before `sketches` is asked for."""

    def __init__(self) -> None:
        self._here: dict[int, Sketch] = {}
        self._away: dict[torch.device, DevicePage] = {}

    def __bool__(self) -> bool:
        return bool(self._here or self._away)

    def add(self, place: int, tensor: torch.Tensor, reading: Reading | None = None) -> bool:
        """Sketch `tensor` as it is at this moment, in one go with `reading`; False where it cannot be done."""
        along = None if reading is None else reading.take
        found = sketch_where_it_lies(tensor, along)
        if found is None and not can_keep(tensor):
            return False
        if tensor.is_cpu:
            self._here[place] = found or sketch(tensor, along)
            return True
        page = self._away.get(tensor.device)
        if page is None:
            from ddpcheck.probes.sketches.batch import DevicePage

            page = self._away[tensor.device] = DevicePage(tensor.device)
        page.add(place, tensor)
        return True

    def send(self) -> None:
        """Nothing more will come: let what is on devices set out for the host."""
        for page in self._away.values():
            page.send()

    def ready(self) -> bool:
        """Whether `sketches` would return without waiting."""
        return all(page.ready() for page in self._away.values())

    def holds_nonfinite(self) -> bool:
        """As far as it is known here and now."""
        return any(found.nonfinite for found in self._here.values())

    def may_hold_nonfinite(self) -> bool:
        """True also where it is not known yet."""
        return bool(self._away) or self.holds_nonfinite()

    def sketches(self) -> dict[int, Sketch]:
        """By place."""
        found = dict(self._here)
        for page in self._away.values():
            found.update(page.sketches())
        return found

"""Sketches every gradient before and after DDP reduces it, and digests what the optimizer applies."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.probes.digest import combine
from ddpcheck.probes.gradient_files import GradientFiles
from ddpcheck.probes.looks import Look, Moment
from ddpcheck.probes.probe import Probe, Scene
from ddpcheck.probes.samples import FIRST
from ddpcheck.probes.sketches.packing import pack
from ddpcheck.probes.sketches.sketch import Sketch, can_sketch, sketch
from ddpcheck.probes.submission import submit
from ddpcheck.records.schema import AppliedRecord, BackwardRecord, Of, Stage

if TYPE_CHECKING:
    from ddpcheck.agent.watched_module import WatchedModule
    from ddpcheck.agent.watched_optimizer import WatchedOptimizer

NO_GRADIENT = bytes(16)
NOTHING = Sketch(0.0, 0.0, 0, 0)
LIVE_RANKS = -1
# A sketch costs several times what a digest does, so --sketch-every may thin it out. Most mistakes show in the
# first steps, which are sketched all the same; steps between are looked through for values that are not finite.
FIRST_STEPS = 8
# What torch can add up as it is; fp8 it cannot.
_SUMMABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
)


@dataclass
class Backward:
    """What was seen of one backward that DDP reduces."""

    number: int
    step: int
    sketched: bool
    local: dict[int, Sketch] = field(default_factory=dict)
    reduced: list[Sketch] = field(default_factory=list)
    # Address and version of each gradient when it had been reduced: they tell whether anybody wrote since.
    marks: list[tuple[int, int]] = field(default_factory=list)
    written: bool = False


class GradientProbe(Probe):
    """At most three passes over the gradients a step: as computed, as reduced, as applied."""

    name = "gradients"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._backwards: dict[int, Backward] = {}
        self._files = GradientFiles(scene)
        self._looks: dict[int, Look] = {}

    def backward_begun(self, watched: WatchedModule) -> None:
        self._write(watched)
        if watched.backward is not None:
            sketched = self._sketches(watched.steps)
            self._backwards[watched.index] = Backward(watched.backward.number, watched.steps, sketched)

    def gradient_ready(self, watched: WatchedModule, place: int, gradient: torch.Tensor) -> None:
        backward = self._backwards[watched.index]
        if backward.sketched or (self._looks_at(backward.step) and _has_nonfinite(gradient)):
            backward.local[place] = _sketch(gradient)
        self._files.keep_local(watched, backward.step, place, gradient)

    def reduced(self, watched: WatchedModule) -> None:
        backward = self._backwards[watched.index]
        gradients = _gradients(watched)
        if backward.sketched or backward.local:
            backward.reduced = [_sketch(gradient) for gradient in gradients]
        backward.marks = _marks(gradients)
        self._files.write(watched, backward.step, gradients)

    def forward(self, watched: WatchedModule) -> None:
        self._write(watched)

    def before_step(self, optimizer: WatchedOptimizer) -> None:
        for watched in optimizer.modules:
            self._write(watched)
            self._files.keep_parameters(watched, optimizer.steps)
            if self._looks_at(optimizer.steps):
                self._write_applied(optimizer, watched)

    def after_step(self, optimizer: WatchedOptimizer) -> None:
        """From here on the user may clear the gradients: they can no longer be captured."""
        for watched in optimizer.modules:
            self._files.write_parameters(watched, optimizer.steps)
            if watched.index in self._looks:
                self._looks.pop(watched.index).current = False

    def ending(self) -> None:
        self._backwards.clear()

    def _looks_at(self, step: int) -> bool:
        return step % self.scene.config.every == 0

    def _sketches(self, step: int) -> bool:
        """Decided by the step alone, so that all ranks sketch the same backwards."""
        often = step < FIRST_STEPS or step % self.scene.config.sketch_every == 0
        return often and self._looks_at(step)

    def _write(self, watched: WatchedModule) -> None:
        """One record a reduced backward, once it is known that nothing more belongs to it."""
        backward = self._backwards.get(watched.index)
        watch = watched.backward
        if watch is None or backward is None or backward.written or not backward.reduced:
            return
        backward.written = True
        part, of = watched.group.index(self.scene.rank), len(watched.group)
        count = len(watched.parameters)
        # A parameter that this rank did not use gives zeros to the sum.
        local = [backward.local.get(place, NOTHING) for place in range(count)]
        known = watch.places
        absent = [p for p, found in enumerate(backward.reduced) if found is NOTHING or p not in known]
        self.scene.write(
            BackwardRecord(
                module=watched.index,
                number=backward.number,
                step=backward.step,
                local=pack(local) if backward.sketched else "",
                reduced=pack(backward.reduced[part::of]) if backward.sketched else "",
                root=hashlib.blake2b(pack(backward.reduced).encode(), digest_size=8).hexdigest(),
                local_nonfinite=_nonfinite(local),
                reduced_nonfinite=_nonfinite(backward.reduced),
                absent=absent,
                divisor=_divisor(watched),
            )
        )

    def _write_applied(self, optimizer: WatchedOptimizer, watched: WatchedModule) -> None:
        watch = watched.backward
        if watch is None:
            return
        owned = optimizer.owned(watched)
        gradients = _gradients(watched)
        places = [place for place in sorted(owned) if gradients[place] is not None]
        leaves = [NO_GRADIENT] * len(gradients)
        chosen = [gradient for place in places if (gradient := gradients[place]) is not None]
        for place, leaf in zip(places, submit(chosen).result(), strict=True):
            leaves[place] = leaf
        backward, window = self._backwards.get(watched.index), watch.window
        root = combine(leaves)
        moved = backward is None or not backward.marks or _marks(gradients) != backward.marks
        self.scene.write(
            AppliedRecord(
                module=watched.index,
                optimizer=optimizer.index,
                step=optimizer.steps,
                root=root.hex(),
                last=window.last.value,
                moved=moved,
                synced=window.synced,
                unsynced=window.unsynced,
                reason=window.reason.value if window.reason is not None else "",
                waiting=list(window.waiting)[:100],
                nonfinite=self._nonfinite_applied(backward, moved, places, gradients),
            )
        )
        if self.scene.disagreements is not None and not watched.loose:
            moment = Moment(watched, Stage.APPLIED, Of.GRADIENTS, optimizer.steps, optimizer.index)
            samples = b"".join(map(_first_values, gradients))
            look = Look(moment, moment.key(self.scene.session), root, leaves, samples)
            self._looks[watched.index] = look
            self.scene.disagreements.publish(look)

    def _nonfinite_applied(
        self,
        backward: Backward | None,
        moved: bool,
        places: list[int],
        gradients: list[torch.Tensor | None],
    ) -> dict[str, int]:
        """What was not finite after the reduction still is, unless somebody wrote to the gradients since."""
        if backward is None or not any(found.nonfinite for found in backward.reduced):
            return {}
        if not moved:
            found = _nonfinite(backward.reduced)
            return {str(place): found[str(place)] for place in places if str(place) in found}
        looked = {place: _sketch(gradients[place]) for place in places}
        return {str(place): one.nonfinite for place, one in looked.items() if one.nonfinite}


def _gradients(watched: WatchedModule) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in watched.tensors(watched.parameters)]


def _marks(gradients: list[torch.Tensor | None]) -> list[tuple[int, int]]:
    return [(0, 0) if g is None else (_address(g), g._version) for g in gradients]


def _address(gradient: torch.Tensor) -> int:
    # Sparse gradients have none; a new one is made in every backward.
    return gradient.data_ptr() if gradient.layout == torch.strided else id(gradient)


def _sketch(gradient: torch.Tensor | None) -> Sketch:
    return NOTHING if gradient is None or not can_sketch(gradient) else sketch(gradient)


def _first_values(gradient: torch.Tensor | None) -> bytes:
    """The gradient's first values behind the number of bytes they take, for showing a step that has passed."""
    if gradient is None or not gradient.is_cpu or gradient.layout != torch.strided:
        return bytes(1)
    size = min(FIRST, gradient.numel() * gradient.element_size()) if gradient.is_contiguous() else 0
    return bytes((size,)) + (ctypes.string_at(gradient.data_ptr(), size) if size else b"")


def _has_nonfinite(gradient: torch.Tensor) -> bool:
    """One quick sum; a doubtful one leads to a closer look. On a device it would have to be waited for."""
    if not gradient.is_cpu or gradient.layout != torch.strided or gradient.dtype not in _SUMMABLE:
        return False
    return not isfinite(abs(gradient.sum().item()))


def _nonfinite(sketches: list[Sketch]) -> dict[str, int]:
    return {str(place): found.nonfinite for place, found in enumerate(sketches) if found.nonfinite}


def _divisor(watched: WatchedModule) -> int:
    """0: the size of the group, as ever."""
    ddp: Any = watched.ddp()
    if watched.joined and not getattr(ddp, "_divide_by_initial_world_size", True):
        return LIVE_RANKS
    return 0

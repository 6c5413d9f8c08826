"""Sketches every gradient before and after DDP reduces it, and digests what the optimizer applies."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import read_along, submit, submit_rest
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, has_memory
from ddpcheck.probes.gradient_files import GradientFiles
from ddpcheck.probes.live_compare.snapshot import Snapshot, SnapshotKey
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.sketches.batch import SketchBatch, can_keep
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.probes.write_detection import FIRST, sample_windows
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.records.sketch_codec import pack
from ddpcheck.records.sketch_shares import share_of
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.probes.digest import DigestFuture

NO_GRADIENT = bytes(16)
NOTHING = Sketch(0.0, 0.0, 0, 0)
LIVE_RANKS = -1
# A sketch costs more than a digest does, so --sketch-every may thin it out. Most mistakes show in the
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
    local: SketchBatch = field(default_factory=SketchBatch)
    # Gradients from before it. Of parameters that a backward leaves out, DDP reduces these once more: that is how a
    # micro-batch under no_sync comes to its right when the last one does not use the same layers.
    left_over: SketchBatch = field(default_factory=SketchBatch)
    # Of this rank's share.
    reduced: SketchBatch = field(default_factory=SketchBatch)
    # Of all reduced gradients, with their places: whether ranks got the same.
    digests: DigestFuture | None = None
    digested: list[int] = field(default_factory=list)
    # Places without a reduced gradient that could be sketched.
    absent: set[int] = field(default_factory=set)
    # Address and version of each gradient when it had been reduced: they tell whether anybody wrote since.
    marks: list[tuple[int, int]] = field(default_factory=list)
    # Of large ones a few bytes, which tell of writes through .data that leave no mark.
    glimpses: list[bytes] = field(default_factory=list)
    # When DDP had finished it: a moment that all ranks come to together.
    finished: float = 0.0
    written: bool = False

    def leaves_now(self, gradients: list[torch.Tensor | None]) -> dict[int, bytes]:
        """By place, digests of large gradients that still hold, as no glimpse tells of a write."""
        if self.digests is None or not self.digests.ready() or not any(self.glimpses):
            return {}
        if any(
            then and sample_windows(now) != then for now, then in zip(gradients, self.glimpses, strict=True)
        ):
            return {}
        leaves = zip(self.digested, self.digests.result(), strict=True)
        return {place: leaf for place, leaf in leaves if self.glimpses[place]}

    def holds(self, places: Sequence[int], leaves: Sequence[bytes]) -> bool:
        """Whether these gradients are what they were when they had been reduced, as far as that was looked at."""
        before = {} if self.digests is None else dict(zip(self.digested, self.digests.result(), strict=True))
        return all(leaf == before.get(place, leaf) for place, leaf in zip(places, leaves, strict=True))


@dataclass(frozen=True)
class DeferredRecord:
    """A record that may still wait for a device."""

    ready: Callable[[], bool]
    write: Callable[[], None]


class GradientProbe(Probe):
    """Two passes over the gradients a step, as computed and as reduced; of small ones a third, as they are applied.

    A sketch takes longer than a digest. As computed all gradients are sketched; as reduced they should
    be the same on every rank, which digests tell, so each rank sketches no more than its share of them, and digests
    that in the same pass. Where a backward may leave parameters out, one more pass goes over the gradients that were
    there before it.
    """

    name = "gradients"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._backwards: dict[int, Backward] = {}
        self._files = GradientFiles(context)
        self._profiled = parse_steps(context.config.profile)
        self._looks: dict[int, Snapshot] = {}
        self._due: deque[DeferredRecord] = deque()
        # Steps begun so far: what comes from a device after the next step has begun is no longer current.
        self._generation = 0

    def after_wrap(self, tracked: TrackedModule) -> None:
        """Compile now what a device needs, not in the first backward."""
        for device in {tensor.device for tensor in tracked.tensors(tracked.parameters)}:
            if device.type == "cuda":
                from ddpcheck.probes.sketches.batch import fused_kernel

                fused_kernel(device)

    def backward_begun(self, tracked: TrackedModule) -> None:
        self._write(tracked)
        watch = tracked.backward
        if watch is None:
            return
        backward = Backward(watch.number, tracked.steps, self._sketches(tracked.steps))
        self._backwards[tracked.index] = backward
        if backward.sketched and watch.finds_unused:
            for place, gradient in enumerate(_gradients(tracked)):
                if gradient is not None:
                    backward.left_over.add(place, gradient)
            backward.left_over.send()

    def gradient_ready(self, tracked: TrackedModule, place: int, gradient: torch.Tensor) -> None:
        backward = self._backwards[tracked.index]
        if backward.sketched or (self._looks_at(backward.step) and _has_nonfinite(gradient)):
            backward.local.add(place, gradient)
        self._files.keep_local(tracked, backward.step, place, gradient)

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        finished = time.time()
        backward = self._backwards[tracked.index]
        backward.finished = finished
        gradients = _gradients(tracked)
        if backward.sketched or backward.local:
            self._look_at_reduced(tracked, backward, gradients)
        backward.marks = _marks(gradients)
        backward.glimpses = list(map(sample_windows, gradients)) if backward.digests is not None else []
        self._files.write(tracked, backward.step, gradients)

    def _look_at_reduced(
        self, tracked: TrackedModule, backward: Backward, gradients: list[torch.Tensor | None]
    ) -> None:
        # Between sketches only this rank looks, because of what it found in its own gradients.
        share = frozenset(self._share(tracked) if backward.sketched else range(len(gradients)))
        present: list[torch.Tensor] = []
        leaves: dict[int, bytes] = {}
        for place, gradient in enumerate(gradients):
            if gradient is None:
                backward.absent.add(place)
                continue
            # Digested in the same pass as it is sketched.
            reading = read_along(gradient) if place in share else None
            kept = backward.reduced.add(place, gradient, reading) if place in share else can_keep(gradient)
            if not kept:
                backward.absent.add(place)
                continue
            if reading is not None:
                leaves[len(present)] = reading.leaf()
            backward.digested.append(place)
            present.append(gradient)
        backward.local.send()
        backward.reduced.send()
        backward.digests = submit_rest(present, leaves)

    def _share(self, tracked: TrackedModule) -> tuple[int, ...]:
        sizes = [tensor.numel() for tensor in tracked.tensors(tracked.parameters)]
        return share_of(sizes, tracked.group.index(self.context.rank), len(tracked.group))

    def before_forward(self, tracked: TrackedModule) -> None:
        self._settle()
        self._write(tracked)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._settle()
        for tracked in optimizer.modules:
            self._write(tracked)
            self._files.keep_parameters(tracked, optimizer.steps)
            if self._looks_at(optimizer.steps):
                self._write_applied(optimizer, tracked)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        """From here on the user may clear the gradients: they can no longer be captured."""
        self._generation += 1
        for tracked in optimizer.modules:
            self._files.write_parameters(tracked, optimizer.steps)
            if tracked.index in self._looks:
                self._looks.pop(tracked.index).current = False

    def before_exit(self) -> None:
        self._settle(wait=True)
        self._backwards.clear()

    def _looks_at(self, step: int) -> bool:
        return step % self.context.config.every == 0

    def _sketches(self, step: int) -> bool:
        """Decided by the step alone, so that all ranks sketch the same backwards."""
        often = step < FIRST_STEPS or step % self.context.config.sketch_every == 0
        # A sketch holds up the backward, and what it hides of the communication would be seen as the job's doing.
        return often and self._looks_at(step) and step not in self._profiled

    def _put(self, due: DeferredRecord) -> None:
        """Write it now if it is complete, else when it is; records keep their order."""
        self._due.append(due)
        self._settle()

    def _settle(self, wait: bool = False) -> None:
        """Write what has arrived from a device; in the training loop nothing waits for it."""
        while self._due and (wait or self._due[0].ready()):
            self._due.popleft().write()

    def _write(self, tracked: TrackedModule) -> None:
        """One record a reduced backward, once it is known that nothing more belongs to it."""
        backward = self._backwards.get(tracked.index)
        watch = tracked.backward
        if watch is None or backward is None or backward.written or backward.digests is None:
            return
        backward.written = True
        share = self._share(tracked)
        count = len(tracked.parameters)
        digests, places = backward.digests, backward.digested
        known, divisor = watch.places - tracked.strangers(), _divisor(tracked)
        absent = [place for place in range(count) if place in backward.absent or place not in known]

        def write() -> None:
            found_local, found = backward.local.sketches(), backward.reduced.sketches()
            # A parameter that this rank did not use, and that had no gradient, gives zeros to the sum.
            given = {**backward.left_over.sketches(), **found_local}
            local = [given.get(place, NOTHING) for place in range(count)]
            reduced = [found.get(place, NOTHING) for place in range(count)]
            self.context.write(
                BackwardRecord(
                    module=tracked.index,
                    number=backward.number,
                    step=backward.step,
                    local=pack(local) if backward.sketched else "",
                    reduced=pack([reduced[place] for place in share]) if backward.sketched else "",
                    root=combine(_leaves(count, places, digests))[:8].hex(),
                    # In the order of their arrival: the first is nearest to where it began.
                    local_nonfinite=_nonfinite(found_local),
                    reduced_nonfinite=_nonfinite(found),
                    absent=absent,
                    divisor=divisor,
                    time=round(backward.finished, 6) if _is_timed(backward.number) else 0.0,
                )
            )

        books = (backward.local, backward.left_over, backward.reduced)
        self._put(DeferredRecord(lambda: digests.ready() and all(book.ready() for book in books), write))

    def _write_applied(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> None:
        watch = tracked.backward
        if watch is None:
            return
        owned = optimizer.owned(tracked)
        gradients = _gradients(tracked)
        places = [place for place in sorted(owned) if gradients[place] is not None]
        backward, window = self._backwards.get(tracked.index), watch.window
        moved = backward is None or not backward.marks or _marks(gradients) != backward.marks
        ticket = _digests_of_applied(None if moved else backward, places, gradients)
        nonfinite = _nonfinite_applied(backward, moved, places, gradients)
        record = AppliedRecord(
            module=tracked.index,
            optimizer=optimizer.index,
            step=optimizer.steps,
            root="",
            last=window.last.value,
            moved=moved,
            # A step right after another one has no backward behind it.
            synced=0 if window.closed else window.synced,
            unsynced=window.unsynced,
            reason=window.reason.value if window.reason is not None else "",
            waiting=list(window.waiting)[:100],
        )
        live = self.context.node_compare is not None and not tracked.loose
        samples = b"".join(map(_first_values, gradients)) if live else b""
        moment = SnapshotKey(tracked, Stage.APPLIED, TensorKind.GRADIENTS, optimizer.steps, optimizer.index)
        count, generation = len(gradients), self._generation

        def write() -> None:
            leaves = _leaves(count, places, ticket)
            root = combine(leaves)
            found = _nonfinite(nonfinite.sketches())
            wrong = {str(place): found[str(place)] for place in places if str(place) in found}
            self.context.write(replace(record, root=root.hex(), nonfinite=wrong))
            if live and self.context.node_compare is not None:
                current = generation == self._generation
                key = moment.key(self.context.session)
                look = Snapshot(moment, key, root, leaves, samples, current=current)
                if current:
                    self._looks[tracked.index] = look
                self.context.node_compare.publish(look)

        self._put(DeferredRecord(lambda: ticket.ready() and nonfinite.ready(), write))


def _is_timed(number: int) -> bool:
    """Clocks of hosts drift slowly: of a long job a part of the moments tells as much. The same on all ranks."""
    return number <= FIRST_STEPS or number % 4 == 0


def _digests_of_applied(
    backward: Backward | None, places: Sequence[int], gradients: list[torch.Tensor | None]
) -> DigestFuture:
    """Of large gradients those from after the reduction, unless something tells of a write since.

    `backward`: the reduced one, where addresses and versions are what they were then.

    Writes through .data leave no mark. For their sake all gradients are read again in the first steps, in which most
    mistakes show, and small ones always; if one of these was written to, or a glimpse of a large one has changed, all
    are.
    """
    present = [gradient for place in places if (gradient := gradients[place]) is not None]
    known = {} if backward is None or backward.step < FIRST_STEPS else backward.leaves_now(gradients)
    if backward is None or not known:
        return submit(present)
    ticket = submit_rest(present, {n: known[place] for n, place in enumerate(places) if place in known})
    # What is on a device is not waited for.
    return ticket if ticket.ready() and backward.holds(places, ticket.result()) else submit(present)


def _leaves(count: int, places: Sequence[int], ticket: DigestFuture) -> list[bytes]:
    """One for each parameter; the ticket's are those of `places`."""
    leaves = [NO_GRADIENT] * count
    for place, leaf in zip(places, ticket.result(), strict=True):
        leaves[place] = leaf
    return leaves


def _nonfinite_applied(
    backward: Backward | None, moved: bool, places: list[int], gradients: list[torch.Tensor | None]
) -> SketchBatch:
    """Sketches that tell what is not finite in what is applied.

    What was not finite after the reduction still is, unless somebody wrote to the gradients since.
    """
    if backward is None:
        return SketchBatch()
    # The share of this rank may be clean where what it gave was not.
    gave = backward.local.holds_nonfinite()
    if not gave and not backward.reduced.may_hold_nonfinite():
        return SketchBatch()
    if not moved and not gave:
        return backward.reduced
    again = SketchBatch()
    for place in places:
        gradient = gradients[place]
        if gradient is not None:
            again.add(place, gradient)
    again.send()
    return again


def _gradients(tracked: TrackedModule) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in tracked.tensors(tracked.parameters)]


def _marks(gradients: list[torch.Tensor | None]) -> list[tuple[int, int]]:
    return [(0, 0) if g is None else (_address(g), g._version) for g in gradients]


def _address(gradient: torch.Tensor) -> int:
    # Sparse gradients have none, and wrappers none that may be asked for; a new one is made in every backward.
    return gradient.data_ptr() if _is_plain(gradient) else id(gradient)


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) in PLAIN_TYPES and gradient.layout == torch.strided


def _first_values(gradient: torch.Tensor | None) -> bytes:
    """The gradient's first values behind the number of bytes they take, for showing a step that has passed."""
    if gradient is None or not gradient.is_cpu or not _is_plain(gradient) or not gradient.is_contiguous():
        return bytes(1)
    size = min(FIRST, gradient.nbytes)
    if not size or not has_memory(gradient, size, gradient.element_size()):
        return bytes(1)
    return bytes((size,)) + ctypes.string_at(gradient.data_ptr(), size)


def _has_nonfinite(gradient: torch.Tensor) -> bool:
    """One quick sum; a doubtful one leads to a closer look. On a device it would have to be waited for."""
    if not gradient.is_cpu or not _is_plain(gradient) or gradient.dtype not in _SUMMABLE:
        return False
    return not isfinite(abs(gradient.sum().item()))


def _nonfinite(sketches: Mapping[int, Sketch]) -> dict[str, int]:
    return {str(place): one.nonfinite for place, one in sketches.items() if one.nonfinite}


def _divisor(tracked: TrackedModule) -> int:
    """0: the size of the group, as ever."""
    ddp: Any = tracked.ddp()
    if tracked.joined and not getattr(ddp, "_divide_by_initial_world_size", True):
        return LIVE_RANKS
    return 0

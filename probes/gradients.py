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

from ddpcheck import torch_compat
from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import incremental_hash, submit, submit_rest
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, has_memory
from ddpcheck.probes.live_compare.node import Snapshot, SnapshotKey
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.sketches.batch import SketchBatch, can_add
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.probes.tensor_dump import GradientFiles
from ddpcheck.probes.write_detection import FIRST, sample_gradient
from ddpcheck.records.codecs import pack, share_of
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.probes.digest import DigestFuture

NO_GRADIENT = bytes(16)
EMPTY_SKETCH = Sketch(0.0, 0.0, 0, 0)
LIVE_RANKS = -1
# A sketch costs more than a digest, so --sketch-every may reduce their number. Most faults appear in the first steps,
# which are always sketched; the steps between sketches are checked for non-finite values.
FIRST_STEPS = 8
# The dtypes that torch can sum directly; fp8 is not among them.
_SUMMABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
)


@dataclass
class Backward:
    """Sketches and digests of one backward that DDP reduces."""

    number: int
    step: int
    sketched: bool
    local: SketchBatch = field(default_factory=SketchBatch)
    # Gradients from before this backward. DDP reduces them again for parameters that the backward does not use. So a
    # micro-batch under no_sync is counted even if the last micro-batch does not use the same layers.
    left_over: SketchBatch = field(default_factory=SketchBatch)
    # This rank's share of the reduced gradients.
    reduced: SketchBatch = field(default_factory=SketchBatch)
    # Digests of all reduced gradients and their parameter indices: whether all ranks got the same result.
    digests: DigestFuture | None = None
    digested: list[int] = field(default_factory=list)
    # Indices of parameters without a reduced gradient that could be sketched.
    absent: set[int] = field(default_factory=set)
    # Address and version of each gradient after its reduction: they show later writes.
    versions: list[tuple[int, int]] = field(default_factory=list)
    # A few bytes of each large gradient: they show writes through .data, which do not change the version.
    samples: list[bytes] = field(default_factory=list)
    # When DDP finished it: all ranks reach this point at the same time.
    finished: float = 0.0
    written: bool = False

    def unchanged_leaves(self, gradients: list[torch.Tensor | None]) -> dict[int, bytes]:
        """By index, digests of large gradients that are still valid, since no sample has changed."""
        if self.digests is None or not self.digests.ready() or not any(self.samples):
            return {}
        pairs = zip(gradients, self.samples, strict=True)
        if any(before and sample_gradient(now) != before for now, before in pairs):
            return {}
        leaves = zip(self.digested, self.digests.result(), strict=True)
        return {index: leaf for index, leaf in leaves if self.samples[index]}

    def matches(self, indices: Sequence[int], leaves: Sequence[bytes]) -> bool:
        """Whether these leaves are those of the reduced gradients, as far as those were digested."""
        before = {} if self.digests is None else dict(zip(self.digested, self.digests.result(), strict=True))
        return all(leaf == before.get(index, leaf) for index, leaf in zip(indices, leaves, strict=True))


@dataclass(frozen=True)
class DeferredRecord:
    """A record that may have to wait for a device."""

    ready: Callable[[], bool]
    write: Callable[[], None]


class GradientProbe(Probe):
    """Two passes over the gradients per step, as computed and as reduced; small ones get a third, as applied.

    A sketch takes longer than a digest. All computed gradients are sketched. Reduced gradients must be the same on
    every rank, which digests show, so each rank sketches only its share of them and digests that share in the same
    pass. If a backward may leave parameters unused, one more pass sketches the gradients from before it.
    """

    name = "gradients"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._backwards: dict[int, Backward] = {}
        self._files = GradientFiles(context)
        self._profiled = parse_steps(context.config.profile)
        self._snapshots: dict[int, Snapshot] = {}
        self._deferred: deque[DeferredRecord] = deque()
        # Steps so far: digests that arrive from a device after the next step are no longer current.
        self._generation = 0

    def after_wrap(self, tracked: TrackedModule) -> None:
        """Compile the kernels of a device now, not in the first backward."""
        for device in {tensor.device for tensor in tracked.tensors(tracked.parameters)}:
            if device.type == "cuda":
                from ddpcheck.probes.sketches.batch import fused_kernel

                fused_kernel(device)

    def backward_begun(self, tracked: TrackedModule) -> None:
        self._write(tracked)
        tracker = tracked.backward
        if tracker is None:
            return
        backward = Backward(tracker.number, tracked.steps, self._is_sketched(tracked.steps))
        self._backwards[tracked.index] = backward
        if backward.sketched and tracker.finds_unused:
            for index, gradient in enumerate(_gradients(tracked)):
                if gradient is not None:
                    backward.left_over.add(index, gradient)
            backward.left_over.send()

    def gradient_ready(self, tracked: TrackedModule, index: int, gradient: torch.Tensor) -> None:
        backward = self._backwards[tracked.index]
        if backward.sketched or (self._is_checked(backward.step) and _has_nonfinite(gradient)):
            backward.local.add(index, gradient)
        self._files.keep_local(tracked, backward.step, index, gradient)

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        finished = time.time()
        backward = self._backwards[tracked.index]
        backward.finished = finished
        gradients = _gradients(tracked)
        if backward.sketched or backward.local:
            self._take_reduced(tracked, backward, gradients)
        backward.versions = _versions(gradients)
        backward.samples = list(map(sample_gradient, gradients)) if backward.digests is not None else []
        self._files.write(tracked, backward.step, gradients)

    def _take_reduced(
        self, tracked: TrackedModule, backward: Backward, gradients: list[torch.Tensor | None]
    ) -> None:
        # Between sketches only this rank does this, because its own gradients have non-finite values.
        share = frozenset(self._share(tracked) if backward.sketched else range(len(gradients)))
        present: list[torch.Tensor] = []
        leaves: dict[int, bytes] = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                backward.absent.add(index)
                continue
            # Hashed in the same pass as it is sketched.
            hasher = incremental_hash(gradient) if index in share else None
            added = backward.reduced.add(index, gradient, hasher) if index in share else can_add(gradient)
            if not added:
                backward.absent.add(index)
                continue
            if hasher is not None:
                leaves[len(present)] = hasher.leaf()
            backward.digested.append(index)
            present.append(gradient)
        backward.local.send()
        backward.reduced.send()
        backward.digests = submit_rest(present, leaves)

    def _share(self, tracked: TrackedModule) -> tuple[int, ...]:
        sizes = [tensor.numel() for tensor in tracked.tensors(tracked.parameters)]
        return share_of(sizes, tracked.group.index(self.context.rank), len(tracked.group))

    def before_forward(self, tracked: TrackedModule) -> None:
        self._drain()
        self._write(tracked)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        self._drain()
        for tracked in optimizer.modules:
            self._write(tracked)
            self._files.keep_parameters(tracked, optimizer.steps)
            if self._is_checked(optimizer.steps):
                self._write_applied(optimizer, tracked)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        """The user may clear the gradients from here on: they can no longer be dumped."""
        self._generation += 1
        for tracked in optimizer.modules:
            self._files.write_parameters(tracked, optimizer.steps)
            if tracked.index in self._snapshots:
                self._snapshots.pop(tracked.index).current = False

    def before_exit(self) -> None:
        self._drain(wait=True)
        self._backwards.clear()

    def _is_checked(self, step: int) -> bool:
        return step % self.context.config.every == 0

    def _is_sketched(self, step: int) -> bool:
        """Depends on the step alone, so that all ranks sketch the same backwards."""
        often = step < FIRST_STEPS or step % self.context.config.sketch_every == 0
        # A sketch delays the backward and would hide communication in a profile.
        return often and self._is_checked(step) and step not in self._profiled

    def _defer(self, deferred: DeferredRecord) -> None:
        """Write the record when it is complete; records keep their order."""
        self._deferred.append(deferred)
        self._drain()

    def _drain(self, wait: bool = False) -> None:
        """Write the records that are complete; never waits in the training loop."""
        while self._deferred and (wait or self._deferred[0].ready()):
            self._deferred.popleft().write()

    def _write(self, tracked: TrackedModule) -> None:
        """One record per reduced backward, written when nothing more can be added to it."""
        backward = self._backwards.get(tracked.index)
        tracker = tracked.backward
        if tracker is None or backward is None or backward.written or backward.digests is None:
            return
        backward.written = True
        share = self._share(tracked)
        count = len(tracked.parameters)
        digests, indices = backward.digests, backward.digested
        known, divisor = tracker.reducer_indices - tracked.unknown_parameters(), _divisor(tracked)
        absent = [index for index in range(count) if index in backward.absent or index not in known]

        def write() -> None:
            local_sketches, reduced_sketches = backward.local.sketches(), backward.reduced.sketches()
            # A parameter that this rank did not use, and that had no gradient, contributes zeros to the sum.
            contributed = {**backward.left_over.sketches(), **local_sketches}
            local = [contributed.get(index, EMPTY_SKETCH) for index in range(count)]
            reduced = [reduced_sketches.get(index, EMPTY_SKETCH) for index in range(count)]
            self.context.write(
                BackwardRecord(
                    module=tracked.index,
                    number=backward.number,
                    step=backward.step,
                    local=pack(local) if backward.sketched else "",
                    reduced=pack([reduced[index] for index in share]) if backward.sketched else "",
                    root=combine(_leaves(count, indices, digests))[:8].hex(),
                    # In the order of arrival: the first is the closest to the cause.
                    local_nonfinite=_nonfinite(local_sketches),
                    reduced_nonfinite=_nonfinite(reduced_sketches),
                    absent=absent,
                    divisor=divisor,
                    time=round(backward.finished, 6) if _is_timed(backward.number) else 0.0,
                )
            )

        batches = (backward.local, backward.left_over, backward.reduced)
        self._defer(
            DeferredRecord(lambda: digests.ready() and all(batch.ready() for batch in batches), write)
        )

    def _write_applied(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> None:
        tracker = tracked.backward
        if tracker is None:
            return
        owned = optimizer.owned(tracked)
        gradients = _gradients(tracked)
        indices = [index for index in sorted(owned) if gradients[index] is not None]
        backward, window = self._backwards.get(tracked.index), tracker.window
        moved = backward is None or not backward.versions or _versions(gradients) != backward.versions
        future = _digests_of_applied(None if moved else backward, indices, gradients)
        nonfinite = _nonfinite_applied(backward, moved, indices, gradients)
        record = AppliedRecord(
            module=tracked.index,
            optimizer=optimizer.index,
            step=optimizer.steps,
            root="",
            last=window.last.value,
            moved=moved,
            # A step directly after another one has no backward of its own.
            synced=0 if window.closed else window.synced,
            unsynced=window.unsynced,
            reason=window.reason.value if window.reason is not None else "",
            waiting=list(window.waiting)[:100],
        )
        live = self.context.node_compare is not None and not tracked.uses_local_sgd
        samples = b"".join(map(_first_values, gradients)) if live else b""
        snapshot_key = SnapshotKey(
            tracked, Stage.APPLIED, TensorKind.GRADIENTS, optimizer.steps, optimizer.index
        )
        count, generation = len(gradients), self._generation

        def write() -> None:
            leaves = _leaves(count, indices, future)
            root = combine(leaves)
            counts = _nonfinite(nonfinite.sketches())
            applied_nonfinite = {str(index): counts[str(index)] for index in indices if str(index) in counts}
            self.context.write(replace(record, root=root.hex(), nonfinite=applied_nonfinite))
            if live and self.context.node_compare is not None:
                current = generation == self._generation
                key_hash = snapshot_key.hash(self.context.session)
                snapshot = Snapshot(snapshot_key, key_hash, root, leaves, samples, current=current)
                if current:
                    self._snapshots[tracked.index] = snapshot
                self.context.node_compare.publish(snapshot)

        self._defer(DeferredRecord(lambda: future.ready() and nonfinite.ready(), write))


def _is_timed(number: int) -> bool:
    """Host clocks drift slowly: in a long job a part of the timestamps is enough. The same on all ranks."""
    return number <= FIRST_STEPS or number % 4 == 0


def _digests_of_applied(
    backward: Backward | None, indices: Sequence[int], gradients: list[torch.Tensor | None]
) -> DigestFuture:
    """Digests of the applied gradients; those of large ones are reused from the reduction unless a write shows.

    `backward`: the reduced backward if addresses and versions are unchanged, else None.

    Writes through .data do not change the version. To find them, all gradients are hashed again in the first steps, in
    which most faults appear, and small ones always. If a small one or a sample of a large one has changed, all are.
    """
    present = [gradient for index in indices if (gradient := gradients[index]) is not None]
    known = {} if backward is None or backward.step < FIRST_STEPS else backward.unchanged_leaves(gradients)
    if backward is None or not known:
        return submit(present)
    future = submit_rest(present, {n: known[index] for n, index in enumerate(indices) if index in known})
    # Does not wait for a device.
    return future if future.ready() and backward.matches(indices, future.result()) else submit(present)


def _leaves(count: int, indices: Sequence[int], future: DigestFuture) -> list[bytes]:
    """One per parameter; `future` has the leaves of those at `indices`."""
    leaves = [NO_GRADIENT] * count
    for index, leaf in zip(indices, future.result(), strict=True):
        leaves[index] = leaf
    return leaves


def _nonfinite_applied(
    backward: Backward | None, moved: bool, indices: list[int], gradients: list[torch.Tensor | None]
) -> SketchBatch:
    """Sketches that count the non-finite values of the applied gradients.

    Values that were not finite after the reduction still are, unless the gradients were written since.
    """
    if backward is None:
        return SketchBatch()
    # This rank's share may be finite although its own gradients are not.
    local = backward.local.holds_nonfinite()
    if not local and not backward.reduced.may_hold_nonfinite():
        return SketchBatch()
    if not moved and not local:
        return backward.reduced
    batch = SketchBatch()
    for index in indices:
        gradient = gradients[index]
        if gradient is not None:
            batch.add(index, gradient)
    batch.send()
    return batch


def _gradients(tracked: TrackedModule) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in tracked.tensors(tracked.parameters)]


def _versions(gradients: list[torch.Tensor | None]) -> list[tuple[int, int]]:
    return [(0, 0) if g is None else (_address(g), torch_compat.tensor_version(g)) for g in gradients]


def _address(gradient: torch.Tensor) -> int:
    # Sparse gradients have no address, and that of a wrapper must not be read; each backward makes a new object.
    return gradient.data_ptr() if _is_plain(gradient) else id(gradient)


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) in PLAIN_TYPES and gradient.layout == torch.strided


def _first_values(gradient: torch.Tensor | None) -> bytes:
    """The first values, preceded by one byte with their size in bytes, to show values of a step in the past."""
    if gradient is None or not gradient.is_cpu or not _is_plain(gradient) or not gradient.is_contiguous():
        return bytes(1)
    size = min(FIRST, gradient.nbytes)
    if not size or not has_memory(gradient, size, gradient.element_size()):
        return bytes(1)
    return bytes((size,)) + ctypes.string_at(gradient.data_ptr(), size)


def _has_nonfinite(gradient: torch.Tensor) -> bool:
    """One fast sum; if it is not finite, the gradient is sketched. Not on a device, where it would wait."""
    if not gradient.is_cpu or not _is_plain(gradient) or gradient.dtype not in _SUMMABLE:
        return False
    return not isfinite(abs(gradient.sum().item()))


def _nonfinite(sketches: Mapping[int, Sketch]) -> dict[str, int]:
    return {str(index): one.nonfinite for index, one in sketches.items() if one.nonfinite}


def _divisor(tracked: TrackedModule) -> int:
    """0: the size of the group, which is the default."""
    ddp: Any = tracked.ddp()
    if tracked.joined and not torch_compat.read(torch_compat.DIVIDE_BY_INITIAL, ddp, True):
        return LIVE_RANKS
    return 0

"""Sketches every gradient before and after DDP reduces it, and digests what the optimizer applies."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ddpcheck import torch_compat
from ddpcheck.device_api import on_device
from ddpcheck.probes.digest.write_detection import FIRST
from ddpcheck.probes.live_compare.node import Snapshot, SnapshotKey
from ddpcheck.probes.live_compare.tensor_dump import GradientFiles
from ddpcheck.probes.probe import BudgetItem, Probe, ProbeContext
from ddpcheck.probes.scan.device_kernels import kernel_of
from ddpcheck.probes.scan.scanner import Scan, TensorScanner, sketch_text
from ddpcheck.probes.scan.table import NUMBERS
from ddpcheck.records.codecs import share_of
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.gradients import AppliedRecord, BackwardRecord
from ddpcheck.step_ranges import parse_steps

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.backward_tracker import BackwardState, BackwardWindow
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer
    from ddpcheck.probes.digest import Leaves
    from ddpcheck.records.reasons import UnsyncedReason, UnwrappedReason

    # How the backwards before a step ended: the last one, how many were reduced and how many were not, why, and what
    # DDP waited for.
    Outcome = tuple[BackwardState, int, int, UnsyncedReason | UnwrappedReason | None, tuple[int, ...]]

LIVE_RANKS = -1
# A sketch costs more than a digest, so --sketch-every and the budget may reduce their number. Most faults appear in the
# first steps, which are always sketched.
FIRST_STEPS = 8


class LocalScans:
    """The scans of this rank's own gradients: one per backward, or several with `gradient_as_bucket_view`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[int], Scan]] = []

    def add(self, indices: Sequence[int], scan: Scan) -> None:
        self._parts.append((indices, scan))

    def __len__(self) -> int:
        return len(self._parts)

    def ready(self) -> bool:
        return all(scan.ready() for _, scan in self._parts)

    def holds_nonfinite(self) -> bool:
        """Whether a result that is complete counts non-finite values."""
        return any(scan.holds_nonfinite() for _, scan in self._parts)

    def may_hold_nonfinite(self) -> bool:
        return any(scan.may_hold_nonfinite() for _, scan in self._parts)

    def numbers(self, count: int, left_over: Scan | None) -> array[float]:
        """The sketches of `count` parameters.

        A parameter without a gradient of this backward contributes what it had before, or zeros.
        """
        if left_over is None and len(self._parts) == 1 and len(self._parts[0][0]) == count:
            return self._parts[0][1].numbers()
        numbers = array("d", bytes(8 * NUMBERS * count)) if left_over is None else left_over.numbers()[:]
        for indices, scan in self._parts:
            part = scan.numbers()
            for row, index in enumerate(indices):
                numbers[NUMBERS * index : NUMBERS * (index + 1)] = part[NUMBERS * row : NUMBERS * (row + 1)]
        return numbers

    def nonfinite(self, order: Sequence[int]) -> dict[str, int]:
        """Number of non-finite values by parameter index, in the order of the backward."""
        counts = {
            indices[row]: count for indices, scan in self._parts for row, count in scan.nonfinite().items()
        }
        return {str(index): counts[index] for index in order if index in counts}


class GradientState(NamedTuple):
    """Addresses and versions of the gradients: they show writes that autograd sees."""

    identities: list[int]
    versions: list[int]


@dataclass
class Backward:
    """Sketches and digests of one backward that DDP reduces."""

    tracked: TrackedModule
    number: int
    step: int
    # What is done with its gradients: sketched, only searched for non-finite values, written to files.
    sketched: bool
    counted: bool
    dumped: bool
    local: LocalScans = field(default_factory=LocalScans)
    # Gradients from before this backward, if they cannot be read at its end. DDP reduces them again for parameters
    # that the backward does not use. So a micro-batch under no_sync counts, whatever layers the last one uses.
    left_over: Scan | None = None
    # Digests of all reduced gradients: whether all ranks got the same result. Sketches of this rank's share of them.
    reduced: Scan | None = None
    # Indices in the order in which their gradients became ready; only if a value may not be finite.
    order: list[int] = field(default_factory=list)
    # The gradients after their reduction.
    state: GradientState | None = None
    # A few bytes of each large gradient: they show writes through .data, which do not change the version.
    windows: bytes = b""
    # When DDP finished it: all ranks reach this point at the same time.
    finished: float = 0.0
    # The module's parameters at the time of this backward: the program may rename or remove some before the step.
    layout: ModuleLayout | None = None
    written: bool = False

    def ready(self) -> bool:
        scans = [scan for scan in (self.left_over, self.reduced) if scan is not None]
        return self.local.ready() and all(scan.ready() for scan in scans)


@dataclass(frozen=True)
class DeferredRecord:
    """A record that may have to wait for a device."""

    ready: Callable[[], bool]
    write: Callable[[], None]


class ModuleLayout(NamedTuple):
    """What follows from a module's list of parameters, kept while it does not change."""

    revision: int
    # Of the list since the wrapping.
    changes: int
    # This rank's share of the reduced gradients: indices, and one byte per parameter.
    share: tuple[int, ...]
    share_mask: bytes
    all_mask: bytes
    # Indices of parameters that the reducer does not know.
    unknown: frozenset[int]


class GradientProbe(Probe):
    """Two passes over the gradients per step, as computed and as reduced; small ones get a third, as applied.

    A sketch takes longer than a digest. All computed gradients are sketched. Reduced gradients must be the same on
    every rank, which digests show, so each rank sketches only its share of them, in the same pass. With
    `gradient_as_bucket_view`, if parameters may be unused, one more pass sketches the gradients from before.
    """

    name = "gradients"
    budget_items: ClassVar[Mapping[str, BudgetItem]] = {
        "backward_begun": BudgetItem.SKETCH,
        "gradients_ready": BudgetItem.SKETCH,
        "gradients_reduced": BudgetItem.SKETCH,
        "before_step": BudgetItem.APPLIED,
        "before_side_step": BudgetItem.APPLIED,
    }

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._backwards: dict[int, Backward] = {}
        self._files = GradientFiles(context)
        self._profiled = parse_steps(context.config.profile)
        self._snapshots: dict[int, Snapshot] = {}
        self._deferred: deque[DeferredRecord] = deque()
        # Per module: its gradients as a whole, and the parts in which its local gradients become ready.
        self._scanners: dict[int, TensorScanner] = {}
        self._local_scanners: dict[int, list[TensorScanner]] = {}
        self._layouts: dict[int, ModuleLayout] = {}
        self._owned: dict[tuple[int, int], tuple[tuple[int, ...], bytes]] = {}
        # By optimizer and module, the backwards of the last step that was written.
        self._windows: dict[tuple[int, int], Outcome] = {}
        # Steps so far: digests that arrive from a device after the next step are no longer current.
        self._generation = 0

    def after_wrap(self, tracked: TrackedModule) -> None:
        """Compile the kernels of a device now, not in the first backward."""
        for tensor in tracked.tensors(tracked.parameters):
            if on_device(tensor):
                kernel_of(tensor.device)

    def wrapper_released(self, tracked: TrackedModule) -> None:
        # A backward without a step after it.
        self._write(tracked)
        for by_module in (self._backwards, self._scanners, self._local_scanners, self._layouts):
            by_module.pop(tracked.index, None)

    def backward_begun(self, tracked: TrackedModule) -> None:
        if self._backwards:
            self._write(tracked)
        tracker = tracked.backward
        if tracker is None:
            return
        step = tracked.steps
        dumped = self._files.wants(step)
        runs = self.context.budget.runs
        # Both are false without the budget's consent.
        may_read = runs(BudgetItem.SKETCH, step)
        sketched = may_read and self._is_sketched(step)
        counted = may_read and not sketched and self._counts_nonfinite(step)
        tracker.skips_gradients = not (sketched or counted or dumped)
        if tracker.skips_gradients and not runs(BudgetItem.APPLIED, step):
            # Most steps of a job with short steps: none of its gradients is read.
            self._backwards.pop(tracked.index, None)
            return
        backward = Backward(tracked, tracker.number, step, sketched, counted, dumped)
        self._backwards[tracked.index] = backward
        if backward.sketched and tracker.finds_unused and tracker.holds:
            gradients = tracked.gradients()
            # Not `count(None)`, which compares tensors.
            if any(gradient is not None for gradient in gradients):
                backward.left_over = self._scan(tracked, gradients, b"", self._layout(tracked).all_mask)

    def gradients_ready(
        self, tracked: TrackedModule, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        backward = self._backwards[tracked.index]
        if backward.sketched or backward.counted:
            scanner = self._local_scanner(tracked, len(gradients), len(backward.local))
            scanner.update(gradients)
            all_rows = _ones(len(gradients))
            if backward.sketched:
                backward.local.add(indices, scanner.scan(gradients, sketch=all_rows))
            else:
                backward.local.add(indices, scanner.scan(gradients, count=all_rows))
        if backward.dumped:
            for index, gradient in zip(indices, gradients, strict=True):
                if gradient is not None:
                    self._files.keep_local(tracked, backward.step, index, gradient)

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        backward = self._backwards.get(tracked.index)
        if backward is None:
            return
        backward.finished = time.time()
        applied = self.context.budget.runs(BudgetItem.APPLIED, backward.step)
        if not (len(backward.local) or backward.dumped or applied):
            return
        gradients = tracked.gradients()
        layout = backward.layout = self._layout(tracked)
        if backward.local.may_hold_nonfinite() and tracked.backward is not None:
            backward.order = tracked.backward.fired_order()
        if backward.sketched or backward.local.holds_nonfinite():
            # Between sketches only this rank does this, because its own gradients have non-finite values.
            share = layout.share_mask if backward.sketched else layout.all_mask
            backward.reduced = self._scan(tracked, gradients, layout.all_mask, share, only_sketchable=True)
            backward.windows = self._scanner(tracked).windows(gradients)
        else:
            self._scanner(tracked).update(gradients)
        backward.state = self._state(tracked, gradients)
        if backward.dumped:
            self._files.write(tracked, backward.step, gradients)

    def _scanner(self, tracked: TrackedModule) -> TensorScanner:
        scanner = self._scanners.get(tracked.index)
        if scanner is None:
            scanner = self._scanners[tracked.index] = TensorScanner()
        return scanner

    def _local_scanner(self, tracked: TrackedModule, count: int, number: int) -> TensorScanner:
        """The scanner of the `number`-th part of the local gradients: that of all gradients, if it has all of them."""
        if number == 0 and count == len(tracked.parameters):
            return self._scanner(tracked)
        parts = self._local_scanners.setdefault(tracked.index, [])
        while number >= len(parts):
            parts.append(TensorScanner())
        return parts[number]

    def _scan(
        self,
        tracked: TrackedModule,
        gradients: Sequence[torch.Tensor | None],
        digest: bytes,
        sketch: bytes,
        only_sketchable: bool = False,
    ) -> Scan:
        scanner = self._scanner(tracked)
        scanner.update(gradients)
        return scanner.scan(gradients, digest, sketch, only_sketchable=only_sketchable)

    def _state(self, tracked: TrackedModule, gradients: Sequence[torch.Tensor | None]) -> GradientState:
        return GradientState(
            self._scanner(tracked).identities(gradients), torch_compat.tensor_versions(gradients)
        )

    def _layout(self, tracked: TrackedModule) -> ModuleLayout:
        layout = self._layouts.get(tracked.index)
        if layout is None or layout.revision != tracked.revision:
            tensors = tracked.parameter_tensors()
            share = share_of(
                [tensor.numel() for tensor in tensors],
                tracked.group.index(self.context.rank),
                len(tracked.group),
            )
            mask = bytearray(len(tensors))
            for index in share:
                mask[index] = 1
            known = tracked.backward.reducer_indices if tracked.backward is not None else set()
            unknown = tracked.unknown_parameters() | (set(range(len(tensors))) - known)
            layout = ModuleLayout(
                tracked.revision,
                tracked.changes_since_wrapping,
                share,
                bytes(mask),
                _ones(len(tensors)),
                frozenset(unknown),
            )
            self._layouts[tracked.index] = layout
        return layout

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._deferred:
            self._drain()
        if self._backwards:
            self._write(tracked)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._deferred:
            self._drain()
        budget = self.context.budget
        runs = budget.runs_beside if optimizer.side else budget.runs
        for tracked in optimizer.modules:
            if self._backwards:
                self._write(tracked)
            self._files.keep_parameters(tracked, optimizer.steps)
            if not self._is_checked(optimizer.steps):
                continue
            if runs(BudgetItem.APPLIED, optimizer.steps):
                self._write_applied(optimizer, tracked)
            else:
                self._write_window(optimizer, tracked)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        """The user may clear the gradients from here on: they can no longer be dumped."""
        self._generation += 1
        for tracked in optimizer.modules:
            self._files.write_parameters(tracked, optimizer.steps)
            if tracked.index in self._snapshots:
                self._snapshots.pop(tracked.index).current = False

    before_side_step = before_step
    after_side_step = after_step

    def before_exit(self) -> None:
        for backward in self._backwards.values():
            self._write(backward.tracked)
        self._drain(wait=True)
        self._backwards.clear()

    def _is_checked(self, step: int) -> bool:
        return step % self.context.config.every == 0

    def _is_sketched(self, step: int) -> bool:
        """Depends on the step alone, so that all ranks sketch the same backwards."""
        often = step < FIRST_STEPS or step % self.context.config.sketch_every == 0
        often = often and self.context.budget.runs(BudgetItem.SKETCH, step)
        # A sketch delays the backward and would hide communication in a profile.
        return often and self._is_checked(step) and step not in self._profiled

    def _counts_nonfinite(self, step: int) -> bool:
        """Between two sketches that the user set apart, one fast pass still counts values that are not finite."""
        return self._is_checked(step) and self.context.budget.runs(BudgetItem.SKETCH, step)

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
        if backward is None or backward.written or tracked.backward is None:
            return
        reduced, layout = backward.reduced, backward.layout
        if reduced is None or layout is None:
            return
        backward.written = True
        divisor = _divisor(tracked)

        def write() -> None:
            # Complete from here on: only the writer's thread reads them.
            local = backward.local.numbers(len(layout.all_mask), backward.left_over)
            numbers, leaves = reduced.numbers(), reduced.leaves()
            # In the order of arrival: the first is the closest to the cause.
            local_nonfinite = backward.local.nonfinite(backward.order)

            def make() -> BackwardRecord:
                return BackwardRecord(
                    module=tracked.index,
                    number=backward.number,
                    step=backward.step,
                    local=sketch_text(local) if backward.sketched else "",
                    reduced=sketch_text(numbers, layout.share) if backward.sketched else "",
                    root=leaves.root()[:8].hex(),
                    local_nonfinite=local_nonfinite,
                    reduced_nonfinite={str(index): count for index, count in reduced.nonfinite().items()},
                    absent=sorted(reduced.absent | layout.unknown),
                    divisor=divisor,
                    time=round(backward.finished, 6) if _is_timed(backward.number) else 0.0,
                    revision=layout.changes,
                )

            self.context.write_later(make)

        self._defer(DeferredRecord(backward.ready, write))

    def _write_applied(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> None:
        tracker = tracked.backward
        if tracker is None:
            return
        gradients = tracked.gradients()
        scanner = self._scanner(tracked)
        scanner.update(gradients)
        backward, window = self._backwards.get(tracked.index), tracker.window
        moved = (
            backward is None or backward.state is None or self._state(tracked, gradients) != backward.state
        )
        owned = self._owned_mask(optimizer, tracked)
        applied, nonfinite = self._scan_applied(scanner, gradients, owned, backward, moved)
        self._windows[optimizer.index, tracked.index] = outcome = _outcome_of(window)
        record = _window_record(optimizer, tracked, outcome, moved)
        compare = self.context.node_compare
        if not tracked.compared_live or tracked.uses_local_sgd:
            compare = None
        samples = scanner.samples(gradients, FIRST, 0)[0] if compare is not None else b""
        snapshot_key = SnapshotKey(
            tracked, Stage.APPLIED, TensorKind.GRADIENTS, optimizer.steps, optimizer.index
        )
        generation = self._generation

        def write() -> None:
            leaves = applied.leaves()
            root = leaves.root()
            counts = nonfinite.nonfinite() if nonfinite is not None else {}
            applied_nonfinite = {str(index): count for index, count in counts.items() if owned[index]}
            self.context.write_later(lambda: replace(record, root=root.hex(), nonfinite=applied_nonfinite))
            if compare is not None:
                current = generation == self._generation
                key_hash = snapshot_key.hash(self.context.session)
                snapshot = Snapshot(snapshot_key, key_hash, root, leaves, samples, current=current)
                if current:
                    self._snapshots[tracked.index] = snapshot
                compare.publish(snapshot)

        self._defer(
            DeferredRecord(lambda: applied.ready() and (nonfinite is None or nonfinite.ready()), write)
        )
        if compare is not None and compare.needs_values(tracked.index, TensorKind.GRADIENTS):
            # On a device, digests arrive when the values are gone: wait once, so that values of this step are dumped.
            self._drain(wait=True)

    def _write_window(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> None:
        """Without digests: only if the backwards of this step are not like those of the last one that was written."""
        if tracked.backward is None:
            return
        outcome = _outcome_of(tracked.backward.window)
        key = (optimizer.index, tracked.index)
        if self._windows.get(key) != outcome:
            self._windows[key] = outcome
            record = _window_record(optimizer, tracked, outcome)
            self._defer(DeferredRecord(lambda: True, lambda: self.context.write(record)))

    def _owned_mask(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> bytes:
        """One byte per parameter: 1 if this optimizer steps it."""
        key = (optimizer.index, tracked.index)
        signature, mask = self._owned.get(key, ((), b""))
        if signature != optimizer.signature:
            owned = optimizer.owned(tracked)
            mask = bytes(index in owned for index in range(len(tracked.parameters)))
            self._owned[key] = optimizer.signature, mask
        return mask

    def _scan_applied(
        self,
        scanner: TensorScanner,
        gradients: Sequence[torch.Tensor | None],
        owned: bytes,
        backward: Backward | None,
        moved: bool,
    ) -> tuple[Scan, Scan | None]:
        """Digests of the applied gradients, and the scan that counts their non-finite values; None: there are none.

        Values that were not finite after the reduction still are, unless the gradients were written since.
        """
        count, nonfinite = b"", None
        if backward is not None:
            # This rank's share may be finite although its own gradients are not.
            local = backward.local.holds_nonfinite()
            if local or (backward.reduced is not None and backward.reduced.may_hold_nonfinite()):
                if moved or local:
                    count = owned
                else:
                    nonfinite = backward.reduced
        scan = None if moved or count or backward is None else _reuse(scanner, gradients, owned, backward)
        if scan is None:
            scan = scanner.scan(gradients, owned, count=count)
        return scan, scan if count else nonfinite


def _outcome_of(window: BackwardWindow) -> Outcome:
    # A step directly after another one has no backward of its own.
    synced = 0 if window.closed else window.synced
    return window.last, synced, window.unsynced, window.reason, window.waiting


def _window_record(
    optimizer: TrackedOptimizer, tracked: TrackedModule, outcome: Outcome, moved: bool = False
) -> AppliedRecord:
    """The backwards that led to this step; without a digest yet."""
    last, synced, unsynced, reason, waiting = outcome
    return AppliedRecord(
        module=tracked.index,
        optimizer=optimizer.index,
        step=optimizer.steps,
        root="",
        last=last.value,
        synced=synced,
        unsynced=unsynced,
        reason=reason.value if reason is not None else "",
        waiting=list(waiting[:100]),
        moved=moved,
    )


def _reuse(
    scanner: TensorScanner, gradients: Sequence[torch.Tensor | None], owned: bytes, backward: Backward
) -> Scan | None:
    """The digests of applied gradients, with those of large ones taken from the reduction; None: read all of them.

    Writes through .data do not change the version. To find them, all gradients are hashed again in the first steps, in
    which most faults appear, and small ones always. If a small one or a sample of a large one has changed, all are.
    """
    reduced = backward.reduced
    if reduced is None or not reduced.ready() or not backward.windows or backward.step < FIRST_STEPS:
        return None
    if scanner.windows(gradients) != backward.windows:
        return None
    large = scanner.large(gradients)
    small = bytearray(owned)
    for row in large:
        small[row] = 0
    scan = scanner.scan(gradients, bytes(small))
    if not scan.ready():
        return None
    before, now = reduced.leaves(), scan.leaves()
    if not _match(before, now, small, reduced.absent):
        return None
    scan.add_leaves({row: before[row] for row in large if owned[row]})
    return scan


def _match(before: Leaves, now: Leaves, mask: bytes | bytearray, absent: frozenset[int]) -> bool:
    """Whether the leaves in `mask` are equal, as far as there were any before."""
    if all(mask) and before == now:
        return True
    rows = (row for row, included in enumerate(mask) if included and row not in absent)
    return all(before[row] == now[row] for row in rows)


def _ones(count: int) -> bytes:
    return b"\1" * count


def _is_timed(number: int) -> bool:
    """Host clocks drift slowly: in a long job a part of the timestamps is enough. The same on all ranks."""
    return number <= FIRST_STEPS or number % 4 == 0


def _divisor(tracked: TrackedModule) -> int:
    """0: the size of the group, which is the default."""
    ddp: Any = tracked.ddp()
    if tracked.joined and not torch_compat.read(torch_compat.DIVIDE_BY_INITIAL, ddp, True):
        return LIVE_RANKS
    return 0

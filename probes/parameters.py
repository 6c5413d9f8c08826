"""Digests every parameter and buffer at each stage of a job, to compare ranks bit by bit."""

from __future__ import annotations

import base64
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ddpcheck.device_api import on_device
from ddpcheck.probes.digest import Leaves
from ddpcheck.probes.digest.write_detection import TensorSamples, WriteDetector, take_samples
from ddpcheck.probes.live_compare.node import Snapshot, SnapshotKey
from ddpcheck.probes.probe import BudgetItem, Probe, ProbeContext
from ddpcheck.probes.scan.device_kernels import losses, lost_while_training
from ddpcheck.probes.scan.scanner import Scan, TensorScanner
from ddpcheck.records.kinds.digests import NORM_STATISTICS, DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.reasons import KERNEL_PROBE, BufferState, WriteWindow
from ddpcheck.torch_compat import tensor_versions

if TYPE_CHECKING:
    import torch

    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Bytes of each leaf in a step's record: the root shows whether ranks agree, leaves only show where. Two bytes miss a
# differing parameter once in 65,536 cases; buffers are many and small, and usually differ together.
WIDTH = {Stage.INIT_BEFORE: 8, Stage.INIT_AFTER: 8, Stage.BUFFERS: 1, Stage.BUFFERS_END: 8}
NARROW = 2
WAIT_SECONDS = 2.0
# For buffers that other ranks may not publish.
SHORT_WAIT_SECONDS = 0.3
# How the last backward before a step ended: its gradients were not reduced.
_UNSYNCED = "unsynced"


class PendingDigest(NamedTuple):
    """Digests that may still be computed on a device."""

    scan: Scan
    key: SnapshotKey
    indices: list[int] | None
    samples: bytes
    only_changes: bool
    hyper: str
    how: str
    # Training forwards so far.
    forward: int


class ParameterWrite(NamedTuple):
    """Parameters that have changed although no optimizer has stepped."""

    pending: PendingDigest
    root: bytes
    leaves: Leaves
    current: bool


class ParameterProbe(Probe):
    """Runs in the training thread: another thread could read a tensor while it is written (see docs)."""

    name = "parameters"
    budget_items: ClassVar[Mapping[str, BudgetItem]] = {
        "buffers_synced": BudgetItem.PARAMS,
        "after_step": BudgetItem.PARAMS,
        "after_side_step": BudgetItem.PARAMS,
    }
    # After a write outside of the step was found.
    on_demand: ClassVar[frozenset[str]] = frozenset({"backward_begun"})

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._pending: deque[PendingDigest] = deque()
        self._last: dict[tuple[int, TensorKind], Snapshot] = {}
        self._scanners: dict[tuple[int, TensorKind], TensorScanner] = {}
        # Samples of each module's parameters after the last step.
        self._samples: dict[int, TensorSamples] = {}
        self._writes = WriteDetector()
        # The first change without an optimizer: a manual update, unless it is reverted or an optimizer steps later.
        # Training at perturbed weights (SAM) begins like that, and each rank may perturb its weights differently.
        self._first_writes: dict[int, ParameterWrite] = {}
        self._manually_updated: set[int] = set()
        # The buffers before the last step, with the number of training forwards so far.
        self._buffer_versions: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self._without_kernel: set[torch.device] = set()
        self._node_compare = context.node_compare
        # The last step of each module, and the number of training forwards before it.
        self._last_steps: dict[int, tuple[SnapshotKey, int]] = {}
        # Modules on a device whose ranks may differ after a step, and the last step that was compared again.
        self._confirms: dict[int, SnapshotKey | None] = {}
        # Modules that were stepped with gradients that were not reduced.
        self._unreduced: set[int] = set()
        self._ended = False

    def before_wrap(self, tracked: TrackedModule) -> None:
        self.context.write(tracked.record())
        self._take_snapshot(SnapshotKey(tracked, Stage.INIT_BEFORE, TensorKind.PARAMETERS, -1))
        self._take_snapshot(SnapshotKey(tracked, Stage.INIT_BEFORE, TensorKind.BUFFERS, -1))

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._take_snapshot(SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.PARAMETERS, -1))
        self._take_snapshot(SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.BUFFERS, -1))
        self._samples[tracked.index] = self._sample(tracked)
        self._write_kernel_losses()

    def unwrapped_found(self, tracked: TrackedModule) -> None:
        self.context.write(tracked.record())
        self._take_snapshot(SnapshotKey(tracked, Stage.INIT_AFTER, TensorKind.PARAMETERS, -1))
        self._samples[tracked.index] = self._sample(tracked)

    def unwrapped_due(self, tracked: TrackedModule) -> None:
        """No optimizer steps it, so it is compared only now and then, and before the job ends."""
        self._take_snapshot(SnapshotKey(tracked, Stage.PARAMS, TensorKind.PARAMETERS, tracked.steps))

    def _write_kernel_losses(self) -> None:
        """Once per device: its tensors are read by operators of torch, which takes much longer, so fewer steps are."""
        for device, choice in losses().items():
            if choice.loss is not None and device not in self._without_kernel:
                self._without_kernel.add(device)
                self.context.budget.limit_slow_reads()
                error = f"{device.type}: {choice.detail}"
                self.context.write(FaultRecord(KERNEL_PROBE, choice.loss.value, error, "", os.getpid()))

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._pending:
            self._drain()
        if self._node_compare is not None:
            self._node_compare.catch_up()
        if not tracked.stepped:
            self._snapshot_manual_update(tracked)
            return
        self._confirm_difference(tracked)
        if self._writes.is_tracking(tracked):
            self._writes.forward(tracked, self._sample(tracked))

    def backward_begun(self, tracked: TrackedModule) -> None:
        if self._writes.is_tracking(tracked):
            self._writes.backward(tracked, self._sample(tracked))

    def unsynced_backward_begun(self, tracked: TrackedModule) -> None:
        """A job that bypasses the wrapper runs no forward of it; manual updates show here instead."""
        if not tracked.stepped:
            self._snapshot_manual_update(tracked)

    def buffers_synced(self, tracked: TrackedModule) -> None:
        due = tracked.syncs % self.context.config.every == 0
        if due and self.context.budget.runs(BudgetItem.PARAMS, tracked.steps):
            self._take_snapshot(SnapshotKey(tracked, Stage.BUFFERS, TensorKind.BUFFERS, tracked.syncs))
            self._mark_outdated(tracked, TensorKind.BUFFERS)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._pending:
            self._drain()
        if self._node_compare is not None:
            self._node_compare.catch_up()
        for tracked in optimizer.modules:
            self._confirm_difference(tracked, optimizer)
            before = self._samples.pop(tracked.index, None)
            # None after a step that the budget left out.
            if before is not None and (samples := self._sample(tracked)) != before:
                key = SnapshotKey(
                    tracked, Stage.REWRITTEN, TensorKind.PARAMETERS, optimizer.steps, optimizer.index
                )
                if not self._writes.tracks:
                    self.context.call(self, Probe.backward_begun)
                self._take_snapshot(key, samples=samples, how=self._writes.window(tracked, before))
            self._mark_outdated(tracked, TensorKind.PARAMETERS)
        # All modules: a GAN runs one module in the step of another.
        for (index, of), snapshot in self._last.items():
            if of is TensorKind.BUFFERS:
                self._buffer_versions[index] = _versions(snapshot.key.tracked)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        if lost_while_training:
            self._write_kernel_losses()
        budget = self.context.budget
        runs = budget.runs_beside if optimizer.side else budget.runs
        for tracked in optimizer.modules:
            self._first_writes.pop(tracked.index, None)
            if not runs(BudgetItem.PARAMS, optimizer.steps):
                continue
            samples = self._samples[tracked.index] = self._sample(tracked)
            key = SnapshotKey(tracked, Stage.PARAMS, TensorKind.PARAMETERS, optimizer.steps, optimizer.index)
            self._last_steps[tracked.index] = key, tracked.forwards
            if tracked.backward is not None and tracked.backward.window.last == _UNSYNCED:
                self._note_unreduced(tracked)
            if optimizer.steps % self.context.config.every == 0:
                indices = self._stepped_indices(optimizer, tracked)
                self._take_snapshot(key, indices, hyper=optimizer.hyper, samples=samples)

    before_side_step = before_step
    after_side_step = after_step

    def wrapper_released(self, tracked: TrackedModule) -> None:
        if self._ended or tracked.role is ModuleRole.USED:
            return
        if tracked.role is ModuleRole.STEPPED:
            # The optimizer was deleted, perhaps after the job has averaged what it trained.
            if tracked.stepped:
                self._snapshot_last_use(tracked)
            return
        self._snapshot_last_buffers(tracked)
        if tracked.stepped:
            self._snapshot_last_use(tracked)
        elif not self._is_rewrapped(tracked):
            self._snapshot_last_update(tracked)

    def before_exit(self) -> None:
        self._ended = True
        self._drain(wait=True)
        deadline = time.monotonic() + WAIT_SECONDS
        for (_, of), snapshot in list(self._last.items()):
            tracked = snapshot.key.tracked
            if not tracked.parameters:
                continue
            if tracked.role is ModuleRole.USED:
                self.unwrapped_due(tracked)
                self._drain(wait=True)
            elif of is TensorKind.BUFFERS:
                self._snapshot_last_buffers(tracked)
            elif not tracked.stepped:
                self._snapshot_last_update(tracked)
            else:
                self._snapshot_last_use(tracked)
            snapshot = self._last[tracked.index, of]
            if self._node_compare is None or snapshot.number < 0:
                continue
            stage = snapshot.key.stage
            if of is TensorKind.PARAMETERS and stage is not Stage.USED:
                self._node_compare.wait_for_peers(snapshot, deadline)
            elif stage in (Stage.BUFFERS_END, Stage.USED):
                short = min(deadline, time.monotonic() + SHORT_WAIT_SECONDS)
                self._node_compare.wait_for_peers(snapshot, short)
        if self._node_compare is not None:
            self._node_compare.wait_for_nodes(deadline)

    def _snapshot_last_buffers(self, tracked: TrackedModule) -> None:
        """After a training forward the statistics of BatchNorm differ as expected; later writes should not differ.

        A forward without a step, as at the end of gradient accumulation, hides such writes.
        """
        if self.context.forwards_captured():
            return  # a replay writes statistics of its own rank, and no hook sees it
        before = self._buffer_versions.get(tracked.index)
        now = _versions(tracked)
        indices, how = tracked.checkpointed_buffers(), ""
        if before is None or before == now or before[0] != now[0]:
            if not tracked.forwards or not _syncs_no_buffers(tracked):
                return
            # Statistics of normalisation layers then differ between ranks as expected; a codebook or a queue must not.
            indices = [index for index in indices if tracked.buffers[index].key not in NORM_STATISTICS]
            how = BufferState.NOT_SYNCED.value
        if indices:
            key = SnapshotKey(tracked, Stage.BUFFERS_END, TensorKind.BUFFERS, -1)
            self._take_snapshot(key, indices, how=how)

    def _confirm_difference(self, tracked: TrackedModule, optimizer: TrackedOptimizer | None = None) -> None:
        """Parameters that differed after the last step are compared again where they are used.

        Only then: a sharded step, or a step on one rank, ends with a broadcast. The step of an optimizer is a use after
        a forward, or after another step of its own; before that, another optimizer finishes the same step.
        """
        if self._node_compare is None or not (self._node_compare.has_unconfirmed or self._confirms):
            return
        last = self._last_steps.get(tracked.index)
        if last is None:
            return
        step, forwards = last
        if optimizer is not None and optimizer.index != step.optimizer and tracked.forwards == forwards:
            return
        differed = self._node_compare.take_unconfirmed(tracked.index)
        if differed and _is_on_device(tracked):
            # There, writes through `.data` show in no sample, and digests arrive late: from now on, each step counts.
            self._confirms.setdefault(tracked.index, None)
        elif tracked.role is ModuleRole.STEPPED and not tracked.mesh and _is_on_device(tracked):
            # No rank compares them live, and jobs average them by hand, through `.data`.
            self._confirms.setdefault(tracked.index, None)
        if tracked.index not in self._confirms:
            if differed:
                self._snapshot_use(tracked, step)
        elif self._confirms[tracked.index] != step and (
            step.step % self.context.config.every == 0 or differed
        ):
            self._confirms[tracked.index] = step
            self._snapshot_use(tracked, step)

    def _note_unreduced(self, tracked: TrackedModule) -> None:
        """Replicas may train apart until the job averages them: on a device, the first mismatch is known too late."""
        if tracked.index not in self._unreduced:
            self._unreduced.add(tracked.index)
            if not tracked.mesh and _is_on_device(tracked):
                self._confirms.setdefault(tracked.index, None)

    def _snapshot_last_use(self, tracked: TrackedModule) -> None:
        """At the end: the parameters as they are kept, if they were written or differed since the last step."""
        last = self._last_steps.get(tracked.index)
        if last is None or not tracked.parameters:
            return
        differed = self._node_compare is not None and self._node_compare.take_unconfirmed(tracked.index)
        # Without samples the budget left the last step out, or writes on a device may have gone unnoticed.
        unread = tracked.index not in self._samples or _is_on_device(tracked)
        if differed or unread or self._is_written(tracked, self._sample(tracked)):
            self._snapshot_use(tracked, last[0])
            self._drain(wait=True)

    def _snapshot_use(self, tracked: TrackedModule, step: SnapshotKey) -> None:
        samples = self._sample(tracked)
        how = WriteWindow.BEFORE_FORWARD.value if self._is_written(tracked, samples) else ""
        self._take_snapshot(step._replace(stage=Stage.USED), samples=samples, how=how)

    def _is_written(self, tracked: TrackedModule, samples: TensorSamples) -> bool:
        """Whether parameters were written since the last step; False if it is not known."""
        before = self._samples.get(tracked.index)
        return before is not None and samples != before

    def _snapshot_manual_update(self, tracked: TrackedModule) -> None:
        """Without an optimizer, a manual update shows as a change between two forwards."""
        if (tracked.index, TensorKind.PARAMETERS) in self._last and tracked.parameters:
            stage = Stage.PARAMS if tracked.forwards else Stage.REWRITTEN
            how = tracked.backward.last_outcome() if tracked.backward is not None and tracked.forwards else ""
            key = SnapshotKey(tracked, stage, TensorKind.PARAMETERS, tracked.steps)
            self._take_snapshot(key, only_changes=True, how=how)

    def _snapshot_last_update(self, tracked: TrackedModule) -> None:
        """Records a manual update after the last forward, and one that was still unconfirmed."""
        self._snapshot_manual_update(tracked)
        self._drain(wait=True)
        first = self._first_writes.pop(tracked.index, None)
        if first is not None:
            self._keep(first)

    def _is_rewrapped(self, tracked: TrackedModule) -> bool:
        """Whether a later wrapper trains the same parameters: ranks may release the old one at any time."""
        own = set(map(id, tracked.tensors(tracked.parameters)))
        others = [snapshot.key.tracked for snapshot in self._last.values()]
        later = [other for other in others if other.index > tracked.index]
        return any(id(tensor) in own for other in later for tensor in other.tensors(other.parameters))

    def _stepped_indices(self, optimizer: TrackedOptimizer, tracked: TrackedModule) -> list[int] | None:
        """The parameters to read after this step; None: all. Those of other optimizers are read at their own steps."""
        owners = tracked.owners
        if len(owners) == 1 and optimizer.index in owners:
            return None
        others = owners.keys() - {optimizer.index}
        last = self._last.get((tracked.index, TensorKind.PARAMETERS))
        if not others or last is None or len(last.leaves) != len(tracked.parameters):
            return None
        elsewhere = set().union(*(tracked.owners[other] for other in others)) - optimizer.owned(tracked)
        return [index for index in range(len(tracked.parameters)) if index not in elsewhere]

    def _take_snapshot(
        self,
        key: SnapshotKey,
        indices: list[int] | None = None,
        only_changes: bool = False,
        hyper: str = "",
        samples: TensorSamples | None = None,
        how: str = "",
    ) -> None:
        tracked = key.tracked
        tensors = _tensors(tracked, key.of)
        if not tensors:
            return
        # Brings the scanner up to date; given samples were taken from the same tensors.
        samples = samples or self._sample(tracked, key.of)
        mask = b"\1" * len(tensors) if indices is None else _mask(indices, len(tensors))
        scan = self._scanners[tracked.index, key.of].scan(tensors, mask)
        pending = PendingDigest(scan, key, indices, samples.first, only_changes, hyper, how, tracked.forwards)
        compare = self.context.node_compare
        if compare is not None and compare.needs_values(tracked.index, key.of):
            # On a device, digests arrive when the values are gone: wait once, so that values of this step are dumped.
            self._drain(wait=True)
            self._finish(pending, current=True)
        elif self._pending or not scan.ready():
            self._pending.append(pending)
        else:
            self._finish(pending, current=True)

    def _sample(self, tracked: TrackedModule, of: TensorKind = TensorKind.PARAMETERS) -> TensorSamples:
        slot = (tracked.index, of)
        scanner = self._scanners.get(slot)
        if scanner is None:
            scanner = self._scanners[slot] = TensorScanner()
        tensors = _tensors(tracked, of)
        scanner.update(tensors)
        return take_samples(scanner, tensors)

    def _drain(self, wait: bool = False) -> None:
        """Process digests that have arrived from a device; never waits in the training loop."""
        while self._pending and (wait or self._pending[0].scan.ready()):
            self._finish(self._pending.popleft(), current=False)

    def _finish(self, pending: PendingDigest, current: bool) -> None:
        key = pending.key
        slot = (key.tracked.index, key.of)
        last = self._last.get(slot)
        leaves = pending.scan.leaves()
        if pending.indices is not None:
            if last is not None and len(last.leaves) == len(leaves):
                leaves = last.leaves.updated({index: leaves[index] for index in pending.indices})
            else:
                leaves = Leaves.of(leaves[index] for index in pending.indices)
        now = ParameterWrite(pending, leaves.root(), leaves, current)
        if not pending.only_changes or self._is_update(now, last):
            self._keep(now)

    def _is_update(self, now: ParameterWrite, last: Snapshot | None) -> bool:
        """Whether this is another manual update, as far as is known yet."""
        key = now.pending.key
        tracked = key.tracked
        first = self._first_writes.get(tracked.index)
        if last is not None and now.root == (last.root if first is None else first.root):
            return False
        tracked.end_window()
        if key.stage is not Stage.PARAMS or tracked.index in self._manually_updated:
            return True
        if first is None:
            self._first_writes[tracked.index] = now
            return False
        del self._first_writes[tracked.index]
        if last is not None and now.root == last.root:
            return False
        self._manually_updated.add(tracked.index)
        self._keep(first._replace(current=False))
        return True

    def _keep(self, write: ParameterWrite) -> None:
        pending, key = write.pending, write.pending.key
        slot = (key.tracked.index, key.of)
        if pending.only_changes:
            key = key._replace(step=key.tracked.next_step)
            if key.stage is Stage.PARAMS:
                key.tracked.count_step()
        last = self._last.get(slot)
        if last is not None:
            last.current = False
        key_hash = key.hash(self.context.session)
        snapshot = Snapshot(key, key_hash, write.root, write.leaves, pending.samples, current=write.current)
        self._last[slot] = snapshot
        self._record(snapshot, pending)

    def _record(self, snapshot: Snapshot, pending: PendingDigest) -> None:
        key, root, leaves, now = snapshot.key, snapshot.root, snapshot.leaves, time.time()
        index, forward, hyper, how = key.tracked.index, pending.forward, pending.hyper, pending.how

        def make() -> DigestRecord:
            width = WIDTH.get(key.stage, NARROW)
            return DigestRecord(
                module=index,
                stage=key.stage.value,
                step=key.step,
                of=key.of.value,
                root=root.hex(),
                leaves=base64.b64encode(leaves.narrow(width)).decode(),
                width=width,
                time=round(now, 4),
                optimizer=key.optimizer,
                forward=forward,
                hyper=hyper,
                how=how,
            )

        self.context.write_later(make)
        # Ranks may differ before the broadcast, and under post-localSGD.
        if self._node_compare is not None and not (
            key.tracked.uses_local_sgd or key.stage is Stage.INIT_BEFORE or not key.tracked.compared_live
        ):
            self._node_compare.publish(snapshot)

    def _mark_outdated(self, tracked: TrackedModule, of: TensorKind) -> None:
        """The tensors may change from here on: they can no longer be dumped."""
        snapshot = self._last.get((tracked.index, of))
        if snapshot is not None:
            snapshot.current = False


def _tensors(tracked: TrackedModule, of: TensorKind) -> list[torch.Tensor]:
    return tracked.tensors(tracked.buffers) if of is TensorKind.BUFFERS else tracked.parameter_tensors()


def _is_on_device(tracked: TrackedModule) -> bool:
    return any(map(on_device, tracked.parameter_tensors()))


def _mask(indices: list[int], count: int) -> bytes:
    mask = bytearray(count)
    for index in indices:
        mask[index] = 1
    return bytes(mask)


def _syncs_no_buffers(tracked: TrackedModule) -> bool:
    """Whether DDP does not synchronise buffers in the forward."""
    return any(tracked.options.get(name) is False for name in ("broadcast_buffers", "forward_sync_buffers"))


def _versions(tracked: TrackedModule) -> tuple[int, list[tuple[int, int]]]:
    """Changes with every write to a buffer that autograd sees, and with every training forward."""
    tensors = tracked.tensors(tracked.buffers)
    return tracked.forwards, list(zip(map(id, tensors), tensor_versions(tensors), strict=True))

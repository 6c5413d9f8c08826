"""Records synchronisation that a job may not need, and the time it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ddpcheck import torch_compat
from ddpcheck.device_api import devices_of
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.callsite import user_callsite
from ddpcheck.probes.process.host_waits import HostWaits
from ddpcheck.records.kinds.modules import ModuleRole
from ddpcheck.records.kinds.needless import HostWaitsRecord, ModuleSyncsRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# The steps in which calls that wait are timed. Afterwards their patches are removed.
FIRST_STEP, STEPS = 4, 24
# Searches and evaluations after which the first record is written.
FIRST_RECORD = 16


class ModuleSyncs:
    """Totals of one module."""

    def __init__(self) -> None:
        self.searches = self.all_used = self.search_ns = 0
        self.evaluations = self.broadcast_ns = 0
        self.where = ""
        # When a forward in evaluation mode began, the call site, and how long the broadcast in it took; a backward
        # makes it a training forward.
        self.begun = 0
        self.open_where = ""
        self.open_ns = 0
        self.search_begun = 0

    @property
    def total(self) -> int:
        return self.searches + self.evaluations


class NeedlessSyncsProbe(Probe):
    """Counts at events of every step; patches functions that wait for a few steps only."""

    name = "needless_syncs"
    on_demand: ClassVar[frozenset[str]] = frozenset(
        {
            # For modules whose unused parameters DDP searches for.
            "forward_computed",
            "after_forward",
            "gradients_reduced",
            # From the first forward in evaluation mode on.
            "buffers_synced",
            "backward_begun",
            "unsynced_backward_begun",
        }
    )

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._modules: dict[int, tuple[TrackedModule, ModuleSyncs]] = {}
        self._written: dict[int, int] = {}
        self._main: int | None = None
        self._waits: HostWaits | None = None
        self._waits_over = False
        # Whether there are searches, and whether there were evaluations.
        self._searches = self._evaluates = False

    def after_wrap(self, tracked: TrackedModule) -> None:
        if tracked.role is not ModuleRole.DDP:
            return
        self._modules[tracked.index] = tracked, ModuleSyncs()
        ddp: Any = tracked.ddp()
        if getattr(ddp, "find_unused_parameters", False) and not getattr(ddp, "static_graph", False):
            if not self._searches:
                self.context.call(self, Probe.forward_computed, Probe.after_forward, Probe.gradients_reduced)
            self._searches = True
            self._call_after_steps()

    # Forwards in evaluation mode with gradients.

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._waits is not None and torch_compat.compiler_in_use():
            # What is compiled may recognise these functions by identity.
            self._waits.end()
        entry = self._modules.get(tracked.index)
        if entry is None:
            return
        syncs = entry[1]
        if syncs.open_ns:
            _close(syncs)
        ddp = tracked.ddp()
        if ddp is not None and not ddp.training:
            syncs.begun = self.context.job_ns()
            if not self._evaluates:
                self._evaluates = True
                self._call_after_steps()
                self.context.call(
                    self, Probe.buffers_synced, Probe.backward_begun, Probe.unsynced_backward_begun
                )

    def buffers_synced(self, tracked: TrackedModule) -> None:
        entry = self._modules.get(tracked.index)
        if entry is not None and entry[1].begun:
            syncs = entry[1]
            syncs.open_ns = max(1, self.context.job_ns() - syncs.begun)
            syncs.begun = 0
            if not syncs.where:
                syncs.open_where = user_callsite()

    def backward_begun(self, tracked: TrackedModule) -> None:
        entry = self._modules.get(tracked.index)
        if entry is not None:
            entry[1].open_ns = entry[1].begun = 0

    unsynced_backward_begun = backward_begun

    # Searches for unused parameters.

    def forward_computed(self, tracked: TrackedModule) -> None:
        entry = self._modules.get(tracked.index)
        if entry is not None:
            entry[1].search_begun = self.context.job_ns()

    def after_forward(self, tracked: TrackedModule) -> None:
        entry = self._modules.get(tracked.index)
        if entry is not None and entry[1].search_begun:
            entry[1].search_ns += self.context.job_ns() - entry[1].search_begun
            entry[1].search_begun = 0

    def gradients_reduced(self, tracked: TrackedModule) -> None:
        entry = self._modules.get(tracked.index)
        ddp: Any = tracked.ddp()
        if entry is None or tracked.backward is None or not getattr(ddp, "find_unused_parameters", False):
            return
        entry[1].searches += 1
        entry[1].all_used += tracked.backward.all_used

    # Calls that wait.

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        if self._waits is not None or self._waits_over or optimizer.steps < FIRST_STEP:
            return
        wrapped = [tracked for tracked in optimizer.modules if tracked.role is ModuleRole.DDP]
        if not wrapped or torch_compat.compiler_in_use():
            return
        self._main = optimizer.index
        devices = devices_of(tensor for tracked in wrapped for tensor in tracked.parameter_tensors()[:1])
        self._waits = HostWaits(self, self.context, {device.type for device in devices}, optimizer.steps)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        waits = self._waits
        if waits is not None and optimizer.index == self._main:
            waits.step = optimizer.steps
            if waits.step - waits.first >= STEPS:
                self._end_waits()
        for tracked in optimizer.modules:
            self._write_at_intervals(tracked)
        if self._waits_over and not (self._searches or self._evaluates):
            self._after_steps = False
            self.context.stop_calling(self, Probe.after_step)

    # Whether `after_step` is called: most jobs have nothing to count when the waits are over.
    _after_steps = True

    def _call_after_steps(self) -> None:
        if not self._after_steps:
            self._after_steps = True
            self.context.call(self, Probe.after_step)

    def _end_waits(self) -> None:
        waits, self._waits = self._waits, None
        self._waits_over = True
        self.context.stop_calling(self, Probe.before_step)
        if waits is not None:
            waits.end()
            # It began inside of step `first`, which is not complete.
            self.context.write(HostWaitsRecord(waits.first + 1, waits.step - waits.first, waits.rows()))

    def _write_at_intervals(self, tracked: TrackedModule) -> None:
        """Records become rarer: a killed job has one that is at most half as old as the job."""
        entry = self._modules.get(tracked.index)
        if entry is not None and entry[1].total >= 2 * self._written.get(tracked.index, FIRST_RECORD // 2):
            self._write(*entry)

    def _write(self, tracked: TrackedModule, syncs: ModuleSyncs) -> None:
        self._written[tracked.index] = syncs.total
        self.context.write(
            ModuleSyncsRecord(
                module=tracked.index,
                step=tracked.steps,
                searches=syncs.searches,
                all_used=syncs.all_used,
                search_us=syncs.search_ns // 1000,
                evaluations=syncs.evaluations,
                broadcast_us=syncs.broadcast_ns // 1000,
                where=syncs.where,
            )
        )

    def wrapper_released(self, tracked: TrackedModule) -> None:
        entry = self._modules.pop(tracked.index, None)
        if entry is not None and entry[1].total:
            self._write(*entry)

    def before_exit(self) -> None:
        self._end_waits()
        for tracked, syncs in self._modules.values():
            if syncs.open_ns:
                _close(syncs)
            if syncs.total:
                self._write(tracked, syncs)


def _close(syncs: ModuleSyncs) -> None:
    """No backward has followed the forward."""
    syncs.evaluations += 1
    syncs.broadcast_ns += syncs.open_ns
    syncs.where = syncs.where or syncs.open_where
    syncs.open_ns = 0

"""Detects parameters added, replaced or unfrozen after wrapping, which DDP's reducer does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.probes.probe import Probe
from ddpcheck.records.schema import LOOSE, CommHookRecord, JoinRecord, StructureRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# Bounds the records of a job that swaps parameters at every step.
MAX_CHANGES = 1000


class ParamSetProbe(Probe):
    """Compares the module with its registered parameters by identity and flags; reads no tensor."""

    name = "structure"
    _written = 0

    def after_wrap(self, tracked: TrackedModule) -> None:
        self._check(tracked)

    def before_forward(self, tracked: TrackedModule) -> None:
        self._check(tracked)
        ddp = tracked.ddp()
        # Private: a version of torch without it has no join().
        if not tracked.joined and getattr(getattr(ddp, "_join_config", None), "enable", False):
            tracked.joined = True
            self.context.write(JoinRecord(tracked.index, tracked.steps))
        hooks = getattr(ddp, "_comm_hooks", ())
        for hook, _ in hooks[tracked.comm_hooks :]:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            tracked.loose |= LOOSE in name
            self.context.write(CommHookRecord(tracked.index, name, tracked.steps))
        tracked.comm_hooks = len(hooks)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        for tracked in optimizer.modules:
            self._check(tracked)

    def _check(self, tracked: TrackedModule) -> None:
        revision = tracked.revision
        changes = tracked.changes()
        if tracked.revision == revision or self._written > MAX_CHANGES:
            return
        self._written += 1 + len(changes)
        # The list of names is written again: later digests follow it.
        self.context.write(tracked.record())
        for change in changes:
            self.context.write(
                StructureRecord(
                    tracked.index, change.change, change.parameter, tracked.steps, tracked.forwards
                )
            )

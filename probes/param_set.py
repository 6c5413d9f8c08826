"""Notices parameters added, replaced or unfrozen after wrapping, which DDP's reducer does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.probes.probe import Probe
from ddpcheck.records.schema import LOOSE, CommHookRecord, JoinRecord, StructureRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer

# A job that swaps parameters at every step must not fill the disk.
MOST_CHANGES = 1000


class ParamSetProbe(Probe):
    """Compares the module with its catalogue: identities and flags only, no tensor is read."""

    name = "structure"
    _written = 0

    def wrapped(self, watched: TrackedModule) -> None:
        self._look(watched)

    def forward(self, watched: TrackedModule) -> None:
        self._look(watched)
        ddp = watched.ddp()
        # Private, and young: a torch without it has no join().
        if not watched.joined and getattr(getattr(ddp, "_join_config", None), "enable", False):
            watched.joined = True
            self.scene.write(JoinRecord(watched.index, watched.steps))
        hooks = getattr(ddp, "_comm_hooks", ())
        for hook, _ in hooks[watched.comm_hooks :]:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            watched.loose |= LOOSE in name
            self.scene.write(CommHookRecord(watched.index, name, watched.steps))
        watched.comm_hooks = len(hooks)

    def before_step(self, optimizer: TrackedOptimizer) -> None:
        for watched in optimizer.modules:
            self._look(watched)

    def _look(self, watched: TrackedModule) -> None:
        revision = watched.revision
        changes = watched.changes()
        if watched.revision == revision or self._written > MOST_CHANGES:
            return
        self._written += 1 + len(changes)
        # The list of names is written anew: digests from here on follow it.
        self.scene.write(watched.record())
        for change in changes:
            self.scene.write(
                StructureRecord(
                    watched.index, change.change, change.parameter, watched.steps, watched.forwards
                )
            )

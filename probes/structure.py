"""Notices parameters added, replaced or unfrozen after wrapping, which DDP's reducer does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.probes.probe import Probe
from ddpcheck.records.schema import JoinRecord, StructureRecord

if TYPE_CHECKING:
    from ddpcheck.agent.watched_module import WatchedModule
    from ddpcheck.agent.watched_optimizer import WatchedOptimizer

# A job that swaps parameters at every step must not fill the disk.
MOST_CHANGES = 1000


class StructureProbe(Probe):
    """Compares the module with its catalogue: identities and flags only, no tensor is read."""

    name = "structure"
    _written = 0

    def wrapped(self, watched: WatchedModule) -> None:
        self._look(watched)

    def forward(self, watched: WatchedModule) -> None:
        self._look(watched)
        if watched.joined:
            return
        ddp = watched.ddp()
        # Private, and young: a torch without it has no join().
        if getattr(getattr(ddp, "_join_config", None), "enable", False):
            watched.joined = True
            self.scene.write(JoinRecord(watched.index, watched.steps))

    def before_step(self, optimizer: WatchedOptimizer) -> None:
        for watched in optimizer.modules:
            self._look(watched)

    def _look(self, watched: WatchedModule) -> None:
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

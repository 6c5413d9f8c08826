"""Detects parameters added, replaced or unfrozen after wrapping, which DDP's reducer does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.records.kinds.modules import CommHookRecord, JoinRecord, ModuleUseRecord, StructureRecord

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import ParamSetChange, TrackedModule

# Bounds the records of a job that swaps parameters at every step.
MAX_CHANGES = 1000


class ParamSetProbe(Probe):
    """Records what the agent detects about each module, by identities and flags; reads no tensor."""

    name = "structure"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._written = 0
        # Modules whose join() is written, and how many communication hooks of each are.
        self._joined: set[int] = set()
        self._hooks: dict[int, int] = {}

    def parameters_changed(self, tracked: TrackedModule, changes: list[ParamSetChange]) -> None:
        if self._written > MAX_CHANGES:
            return
        self._written += 1 + len(changes)
        # Digests that follow refer to this list of names.
        self.context.write(tracked.record())
        for change in changes:
            self.context.write(
                StructureRecord(
                    tracked.index, change.change, change.parameter, tracked.steps, tracked.forwards
                )
            )

    def module_used(self, tracked: TrackedModule, evidence: list[str]) -> None:
        self.context.write(ModuleUseRecord(tracked.index, evidence))

    def before_forward(self, tracked: TrackedModule) -> None:
        if tracked.joined and tracked.index not in self._joined:
            self._joined.add(tracked.index)
            self.context.write(JoinRecord(tracked.index, tracked.steps))
        for name in tracked.comm_hooks[self._hooks.get(tracked.index, 0) :]:
            self.context.write(CommHookRecord(tracked.index, name, tracked.steps))
        self._hooks[tracked.index] = len(tracked.comm_hooks)

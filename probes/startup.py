"""Records the start-up of a rank until its first step: what was loaded, copied and broadcast, and the time it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpcheck.device_api import memory_of_process
from ddpcheck.probes.probe import Probe, ProbeContext
from ddpcheck.probes.process.os_counters import resident
from ddpcheck.probes.process.startup_tracer import STARTUP, StageStart
from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

if TYPE_CHECKING:
    from ddpcheck.agent.tracked_module import TrackedModule
    from ddpcheck.agent.tracked_optimizer import TrackedOptimizer


class StartupProbe(Probe):
    """Only for the first process group of a process: later ones start in a warm process."""

    name = "startup"

    def __init__(self, context: ProbeContext) -> None:
        super().__init__(context)
        self._batch: StageStart | None = None
        self._first_forward: tuple[float, float] | None = None
        self._done = STARTUP.over
        if not self._done:
            STARTUP.write_to(context.write)

    def after_wrap(self, tracked: TrackedModule) -> None:
        if not self._done:
            # Of several modules, the last one wrapped.
            STARTUP.drop(self._batch)
            self._batch = STARTUP.begin(StartupStage.BATCH)

    def before_forward(self, tracked: TrackedModule) -> None:
        if self._done or self._first_forward is not None:
            return
        STARTUP.finish(self._batch)
        STARTUP.end()
        self._first_forward = (time.time(), time.monotonic())
        self.context.stop_calling(self, Probe.before_forward)

    def after_step(self, optimizer: TrackedOptimizer) -> None:
        if self._done or self._first_forward is None:
            return
        self._done = True
        self.context.stop_calling(self, Probe.after_step)
        began, clock = self._first_forward
        self.context.write(
            StartupRecord(
                StartupStage.STEP.value,
                round(began, 4),
                round(time.monotonic() - clock, 4),
                host=resident().whole,
                device=memory_of_process().allocated,
            )
        )

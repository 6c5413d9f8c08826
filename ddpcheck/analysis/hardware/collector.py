"""Collects when each rank took its steps, to relate samples of the hardware to steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.analysis.hardware.step_times import StepTimes
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import BackwardRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

_PARAMS = Stage.PARAMS.value


class StepTimelineCollector(Collector):
    """Times of steps, and the number of reduced backwards."""

    def __init__(self, attempt: Attempt) -> None:
        self.step_times = StepTimes()

    @collects_per_module(DigestRecord)
    def add_digest(self, rank: RankData, module: ModuleKey, record: DigestRecord) -> None:
        if record.stage == _PARAMS:
            optimizer = -1 if record.optimizer is None else record.optimizer
            self.step_times.step(rank.number, (module, optimizer), record.step, record.time)

    @collects_per_module(BackwardRecord)
    def add_backward(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        self.step_times.reduced(module, record.number)

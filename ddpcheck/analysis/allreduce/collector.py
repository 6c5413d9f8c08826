"""Passes the sketches of reduced backwards to the verification of AllReduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import SKETCH_PROBES, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.allreduce.verify import AllReduceVerifier
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import FaultRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


class GradientCollector(Collector):
    """Verifies reduced gradients."""

    def __init__(self, attempt: Attempt) -> None:
        self._agreement = attempt.agreement
        self.verifier = AllReduceVerifier(hashes=self._agreement.hashes)

    @collects_per_module(BackwardRecord)
    def add_backward(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        self.verifier.add(rank.number, module, record, rank.latest[module], self._agreement.ended)

    @collects_per_module(JoinRecord)
    def add_join(self, rank: RankData, module: ModuleKey, record: JoinRecord) -> None:
        self.verifier.joined.add(module)

    @collects(FaultRecord)
    def add_fault(self, rank: RankData, record: FaultRecord) -> None:
        if record.probe in SKETCH_PROBES:
            self.verifier.lost.add(rank.number)

    def end(self, attempt: Attempt) -> None:
        ranks = attempt.ranks
        members = {number for group, _ in attempt.modules() for number in group}
        self.verifier.lost |= {
            number for number in members if number not in ranks or ranks[number].end is None
        }
        self.verifier.end()

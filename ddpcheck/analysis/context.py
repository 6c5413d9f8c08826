"""A case: one attempt of a run with all that the rules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.traffic import Traffic
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.analysis.run_reader import NodeNotes
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.explanations import title
from ddpcheck.records.kinds.rank import FaultRecord


@dataclass(frozen=True)
class RuleContext:
    """Handed to every rule. A run in which no rank reported has one case with an empty attempt."""

    attempt: Attempt
    number: int
    folder: Path
    notes: NodeNotes
    ranks: tuple[RankSummary, ...]
    exit_code: int | None
    # Faults of processes that never became a rank.
    strays: tuple[FaultRecord, ...] = ()
    # By rank, why it could not write its records.
    troubles: Mapping[int, str] = field(default_factory=dict)
    # The later attempt of the same elastic job in which all ranks finished.
    made_good_by: int | None = None
    # Of the last attempt, where the nodes were sampled.
    traffic: Traffic | None = None
    nodes: tuple[NodeSamples, ...] = ()
    # Between its nodes, likewise.
    links: NodeLinks | None = None
    # What the profiled steps show, where there are any.
    overlap: Overlap | None = None
    # Where the time of a step goes, for each set of ranks that synchronise.
    time: tuple[TimeTable, ...] = ()

    def modules(self) -> list[ModuleKey]:
        """Modules that have anyone to agree with."""
        return [module for module in self.attempt.modules() if len(module[0]) > 1]

    def with_status(self, *wanted: RankStatus) -> list[RankSummary]:
        return [row for row in self.ranks if row.status in wanted]

    def finding(
        self,
        code: str,
        message: str,
        *,
        severity: Severity = Severity.ERROR,
        found: Disagreement | None = None,
        module: ModuleKey | None = None,
        step: int | None = None,
        stage: str | None = None,
        parameter: str | None = None,
        ranks: tuple[int, ...] = (),
        evidence: Mapping[str, Any] | None = None,
        cause: str = "",
        fix: str = "",
    ) -> Finding:
        """A finding of this attempt; `found` fills in where and who."""
        if found is not None:
            module = found.moment.module if module is None else module
            stage = found.moment.stage if stage is None else stage
            step = found.moment.step if step is None else step
            ranks = ranks or found.outlier_ranks()
        return Finding(
            code=code,
            severity=severity,
            title=title(code),
            message=message,
            module=None if module is None else self.attempt.number(module),
            step=None if step is not None and step < 0 else step,
            stage=stage,
            parameter=parameter,
            ranks=ranks,
            evidence=dict(evidence or {}),
            cause=cause,
            fix=fix,
            attempt=self.number,
        )

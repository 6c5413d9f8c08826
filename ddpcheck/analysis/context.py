"""What a rule receives: one attempt of a run with everything that rules examine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_sharded_root
from ddpcheck.analysis.divergence.explain import Divergence, ModuleDivergence, explain_module
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.traffic import Traffic
from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.analysis.sharding.mesh import MESH, coordinates_of, coordinates_text
from ddpcheck.analysis.step_coverage.build import coverage_of
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.records.kinds.rank import FaultRecord

if TYPE_CHECKING:
    from ddpcheck.rules.rule import Rule


@dataclass(frozen=True)
class RuleContext:
    """Given to every rule. A run in which no rank reported has one context with an empty attempt."""

    attempt: Attempt
    number: int
    folder: Path
    notes: NodeNotes
    ranks: tuple[RankSummary, ...]
    exit_code: int | None
    # Faults of processes that never became a rank.
    unattributed_faults: tuple[FaultRecord, ...] = ()
    # By rank, why it could not write its records.
    write_errors: Mapping[int, str] = field(default_factory=dict)
    # The later attempt of the same elastic job in which all ranks finished.
    recovered_by: int | None = None
    # Traffic, samples and links of the nodes: of the last attempt only.
    traffic: Traffic | None = None
    nodes: tuple[NodeSamples, ...] = ()
    links: NodeLinks | None = None
    # None if no step was profiled.
    overlap: Overlap | None = None
    # The parts of a step, for each set of ranks that synchronise.
    time: tuple[TimeTable, ...] = ()
    _divergences: dict[ModuleKey, ModuleDivergence] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _coverages: list[Coverage] = field(default_factory=list, init=False, repr=False, compare=False)

    def time_of(self, module: ModuleKey) -> TimeTable | None:
        """The step times of the ranks that hold the module."""
        return next((table for table in self.time if set(table.group) == set(module[0])), None)

    def coverage(self) -> Coverage:
        """What was trained and what of it was compared; worked out once."""
        if not self._coverages:
            self._coverages.append(coverage_of(self.attempt, self.write_errors))
        return self._coverages[0]

    def modules(self) -> list[ModuleKey]:
        """Modules that are replicated on more than one rank."""
        attempt = self.attempt
        return [module for module in attempt.modules() if len(module[0]) > 1 and attempt.is_replica(module)]

    def modules_with_forwards(self) -> list[ModuleKey]:
        """The same, and the outermost modules that FSDP shards: their forwards are compared, not their parameters."""
        return [*self.modules(), *self.attempt.sharded_roots()]

    def with_status(self, *wanted: RankStatus) -> list[RankSummary]:
        return [row for row in self.ranks if row.status in wanted]

    def divergence(self, module: ModuleKey) -> ModuleDivergence:
        """Where the replicas of `module` diverge and which rule explains it; worked out once."""
        if module not in self._divergences:
            # Rules import this module.
            from ddpcheck.rules.rule import rules

            self._divergences[module] = explain_module(self.attempt, module, rules())
        return self._divergences[module]

    def diverged_parameters(self, rule: Rule) -> list[Divergence]:
        """The divergences of parameters that `rule` explains, at most one per module."""
        every = [self.divergence(module).parameters for module in self.modules()]
        return [one for one in every if one is not None and one.code == rule.code]

    def diverged_gradients(self, rule: Rule) -> list[Divergence]:
        """The divergences of gradients that `rule` explains, at most one per module."""
        every = [self.divergence(module).gradients for module in self.modules()]
        return [one for one in every if one is not None and one.code == rule.code]

    def finding(
        self,
        rule: Rule,
        message: str,
        *,
        severity: Severity | None = None,
        disagreement: Disagreement | None = None,
        module: ModuleKey | None = None,
        step: int | None = None,
        stage: str | None = None,
        parameter: str | None = None,
        ranks: tuple[int, ...] = (),
        evidence: Mapping[str, Any] | None = None,
        cause: str = "",
        fix: str = "",
    ) -> Finding:
        """A finding of this attempt. `disagreement` supplies module, stage, step and ranks if they are not given."""
        if disagreement is not None:
            key = disagreement.key
            module = key.module if module is None else module
            stage = key.stage if stage is None else stage
            step = key.step if step is None else step
            ranks = ranks or disagreement.outlier_ranks()
        evidence = dict(evidence or {})
        coordinates = {} if module is None else coordinates_of(self.attempt, module, ranks or module[0])
        if coordinates:
            message = f"{message} {coordinates_text(coordinates)}"
            evidence[MESH] = {str(rank): row for rank, row in coordinates.items()}
        return Finding(
            code=rule.code,
            severity=rule.severity if severity is None else severity,
            title=rule.title,
            message=message,
            # The outermost module of shards is not in the report's list of modules.
            module=None if module is None or is_sharded_root(module) else self.attempt.number(module),
            step=None if step is not None and step < 0 else step,
            stage=stage,
            parameter=parameter,
            ranks=ranks,
            evidence=evidence,
            cause=cause,
            fix=fix,
            attempt=self.number,
        )

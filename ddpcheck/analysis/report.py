"""The finished analysis of a run: everything that reports show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.cost.model import CostTable
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.analysis.timeseries.model import AgreementHistory, EnvironmentRow, GradientHistory
from ddpcheck.analysis.timing.collector import HostClock
from ddpcheck.analysis.timing.model import TimeTable

if TYPE_CHECKING:
    from ddpcheck.analysis.memory.table import MemoryTable
    from ddpcheck.analysis.startup.table import StartupTable
    from ddpcheck.analysis.timeseries.model import RunTimeSeries

# Version of report.json, which other programs read. 1 (2026-11): first version.
REPORT_SCHEMA = 1


class Verdict(str, Enum):
    """The overall result of a run."""

    OK = "ok"
    FINDINGS = "findings"  # at least one error or warning
    FAILED = "failed"  # the user's command itself failed
    INCOMPLETE = "incomplete"  # too few records for a result


class RankStatus(str, Enum):
    """How a rank ended, from its records and from what its launcher observed."""

    FINISHED = "finished"
    RAISED = "raised"  # ended by an exception or a non-zero sys.exit
    DIED = "died"  # killed or crashed before all others, or crashed while Python shut down
    STOPPED = "stopped"  # by the launcher after the death of another rank, or by the user
    RUNNING = "running"  # still running, or its end is not known
    MISSING = "missing"  # wrote no records


@dataclass(frozen=True)
class RankSummary:
    """One row of the table of ranks."""

    rank: int
    status: RankStatus
    attempt: int = 0
    host: str = ""
    pid: int = 0
    local_rank: int | None = None
    device: str = ""
    steps: int = 0
    last_step: int | None = None
    last_stage: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """One kind of comparison, with or without a finding."""

    name: str  # e.g. "parameters after each step"
    compared: int  # number of comparisons across ranks
    outcome: str  # "agree", "differ", "not checked"
    detail: str = ""  # e.g. "120 steps x 4 ranks, 148 parameters", or the reason why it was not checked
    # Steps that the budget left out.
    steps_left_out: int = 0


@dataclass(frozen=True)
class AttemptSummary:
    """One launch of the job: each elastic restart is one, and each of several jobs in sequence."""

    number: int
    world_size: int
    steps: int
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True)
class DataEpoch:
    """How the samples of one epoch were distributed over the ranks of a module."""

    module: str
    loader: int
    epoch: int
    step: int
    samples: int
    ranks: int
    # Samples drawn, by rank; only the first ranks of very large jobs.
    per_rank: Mapping[str, int]
    # Samples that several ranks drew, samples that no rank drew, and draws in excess of the dataset; null: not known.
    overlap: int | None
    missing: int | None
    padding: int | None
    # Whether every rank drew its whole share, and whether counts are exact or estimates.
    complete: bool = True
    exact: bool = True
    sampler: str = ""


@dataclass(frozen=True)
class Report:
    """The contents of report.json; every report renders it."""

    verdict: Verdict
    world_size: int
    steps: int
    command: tuple[str, ...]
    exit_code: int | None
    findings: tuple[Finding, ...]
    attempts: tuple[AttemptSummary, ...]
    checks: tuple[Check, ...]
    # What the verdict is based on: of the last attempt, or of the first that is not complete. None if no rank reported,
    # and in reports of earlier versions.
    coverage: Coverage | None = None
    # Findings that could not be judged although their measurements are there, by code: the reason.
    not_judged: Mapping[str, str] = field(default_factory=dict)
    # The first epochs of the last attempt.
    data: tuple[DataEpoch, ...] = ()
    # Hardware and utilization of the nodes, and the traffic of a step of the last attempt.
    hardware: Mapping[str, Any] = field(default_factory=dict)
    traffic: Mapping[str, Any] = field(default_factory=dict)
    # Throughput of the links between nodes.
    links: Mapping[str, Any] = field(default_factory=dict)
    # Of the last attempt.
    time: tuple[TimeTable, ...] = ()
    # What ddpcheck itself took in the last attempt; None if its records do not say.
    cost: CostTable | None = None
    # Memory and start-up of each rank of the last attempt.
    memory: MemoryTable | None = None
    startup: StartupTable | None = None
    # Of the last profiled attempt.
    overlap: Overlap | None = None
    # Agreement and gradients of the last attempt over its steps, and the environments of its ranks.
    agreement: tuple[AgreementHistory, ...] = ()
    gradients: tuple[GradientHistory, ...] = ()
    environment: tuple[EnvironmentRow, ...] = ()
    # Of the last attempt, if it ran on several hosts.
    hosts: tuple[HostClock, ...] = ()
    # Time series for reports that draw charts. Only built on request; not in report.json.
    course: RunTimeSeries | None = field(default=None, compare=False, repr=False)
    # path, name, id, started (ISO 8601), seconds, ddpcheck and torch versions, hosts
    run: Mapping[str, Any] = field(default_factory=dict)
    schema: int = REPORT_SCHEMA

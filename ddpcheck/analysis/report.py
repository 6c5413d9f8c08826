"""The finished analysis of a run: everything a report shows, nothing left to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.timeseries.model import AgreementHistory, EnvironmentRow, GradientHistory
from ddpcheck.analysis.timing.clock_offsets import HostClock
from ddpcheck.analysis.timing.model import TimeTable

if TYPE_CHECKING:
    from ddpcheck.analysis.memory.table import MemoryTable
    from ddpcheck.analysis.startup.table import StartupTable
    from ddpcheck.analysis.timeseries.model import RunTimeSeries

# Version of report.json, which other programs read. 1 (2026-11): first version.
REPORT_SCHEMA = 1


class Verdict(str, Enum):
    """The one word that heads a report."""

    OK = "ok"
    FINDINGS = "findings"  # at least one error or warning
    FAILED = "failed"  # the user's command itself failed
    INCOMPLETE = "incomplete"  # too little was recorded to say


class RankStatus(str, Enum):
    """How a rank ended, as far as its records and its node's launcher can tell."""

    FINISHED = "finished"
    RAISED = "raised"  # left by an exception or a non-zero sys.exit
    DIED = "died"  # vanished without a goodbye, first of all; or crashed after it, while Python shut down
    STOPPED = "stopped"  # ended from outside: by the launcher after another rank's death, or by the user
    RUNNING = "running"  # still there, or nothing is known of its end
    MISSING = "missing"  # never reported


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
    """One thing that was looked at, whether or not it raised a finding."""

    name: str  # e.g. "parameters after each step"
    compared: int  # how many comparisons across ranks were made
    outcome: str  # "agree", "differ", "not checked"
    detail: str = ""  # e.g. "120 steps x 4 ranks, 148 parameters", or why it was not checked


@dataclass(frozen=True)
class AttemptSummary:
    """One start of the job: elastic restarts and jobs in sequence each make one."""

    number: int
    world_size: int
    steps: int
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True)
class DataEpoch:
    """How one epoch's samples were dealt out to the ranks of a module."""

    module: str
    loader: int
    epoch: int
    step: int
    samples: int
    ranks: int
    # Samples drawn, by rank; the first ranks only where there are very many.
    per_rank: Mapping[str, int]
    # Samples that several ranks drew, that none drew, and draws beyond one for each sample; null: not known.
    overlap: int | None
    missing: int | None
    padding: int | None
    # Whether every rank went through its share, and whether counts are exact or estimates.
    complete: bool = True
    exact: bool = True
    sampler: str = ""


@dataclass(frozen=True)
class Report:
    """What report.json holds and every report renders."""

    verdict: Verdict
    world_size: int
    steps: int
    command: tuple[str, ...]
    exit_code: int | None
    findings: tuple[Finding, ...]
    attempts: tuple[AttemptSummary, ...]
    checks: tuple[Check, ...]
    # The last attempt's, the first epochs of it.
    data: tuple[DataEpoch, ...] = ()
    # What the nodes have and did, and what moved between them in a step of the last attempt.
    hardware: Mapping[str, Any] = field(default_factory=dict)
    traffic: Mapping[str, Any] = field(default_factory=dict)
    # What the links between nodes gave while they were asked.
    links: Mapping[str, Any] = field(default_factory=dict)
    # Also the last attempt's.
    time: tuple[TimeTable, ...] = ()
    # The last attempt's too: what each rank's memory held, and its way to the first step.
    memory: MemoryTable | None = None
    startup: StartupTable | None = None
    # Of the last attempt that was profiled.
    overlap: Overlap | None = None
    # The course of the last attempt over its steps, and what its ranks ran in.
    agreement: tuple[AgreementHistory, ...] = ()
    gradients: tuple[GradientHistory, ...] = ()
    environment: tuple[EnvironmentRow, ...] = ()
    # Of the last attempt, where it ran on several.
    hosts: tuple[HostClock, ...] = ()
    # Figures over the steps, for reports that draw them; made where one is asked for, and no part of report.json.
    course: RunTimeSeries | None = field(default=None, compare=False, repr=False)
    # path, name, id, started (ISO 8601), seconds, ddpcheck and torch versions, hosts
    run: Mapping[str, Any] = field(default_factory=dict)
    schema: int = REPORT_SCHEMA

"""State of a running job, for views that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.finding import Finding


@dataclass(frozen=True)
class LiveRank:
    """One rank. Times are medians of its latest steps, in microseconds."""

    rank: int
    host: str
    # "running", "finished" or "raised"; "vanished": the job is over and the rank wrote no last record.
    status: str
    steps: int
    step_us: int | None = None
    # data, forward, backward, optimizer, other, wait
    parts_us: Mapping[str, int] = field(default_factory=dict)
    # Current and peak memory, in bytes.
    memory: int = 0
    peak_memory: int = 0
    # Its exception, where it raised.
    error: str = ""


@dataclass(frozen=True)
class LiveAgreement:
    """Whether replicas have equal parameters, as far as they were compared."""

    # Compared steps, of the module with the most.
    compared: int = 0
    diverged: bool = False
    # Where they diverged first, and the outlier ranks.
    step: int | None = None
    stage: str = ""
    outliers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LiveStepTime:
    """Step times of the job, from the latest steps."""

    step_us: int
    # Step times of one rank, the latest last.
    recent_us: tuple[int, ...]
    # Shares of the step: communication that does not overlap, and waiting for stragglers.
    exposed: float
    late: float
    # The rank with the shortest wait, which the others wait for.
    latest_rank: int


@dataclass(frozen=True)
class LiveState:
    """The latest attempt of a run."""

    name: str
    world_size: int = 0
    # Number of the attempt, from 0.
    attempt: int = 0
    ranks: tuple[LiveRank, ...] = ()
    agreement: LiveAgreement = field(default_factory=LiveAgreement)
    step_time: LiveStepTime | None = None
    finding: Finding | None = None
    # Since the job began, and since the last progress of any rank.
    seconds: float = 0.0
    quiet_seconds: float = 0.0
    # No progress for longer than steps of this job take.
    stalled: bool = False
    # The command has ended; or its launcher is gone without having recorded an end.
    ended: bool = False
    abandoned: bool = False

    @property
    def steps(self) -> int:
        """Steps of the rank with the most."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def fewest_steps(self) -> int:
        return min((rank.steps for rank in self.ranks), default=0)

"""What is known of a run at one moment, for views that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.finding import Finding


@dataclass(frozen=True)
class LiveRank:
    """One rank; times are medians of its latest steps, in microseconds."""

    rank: int
    host: str
    # "running", "finished" or "raised"; "vanished" where the job is over and it never said goodbye.
    status: str
    steps: int
    step_us: int | None = None
    # data, forward, backward, optimizer, other, wait
    parts_us: Mapping[str, int] = field(default_factory=dict)
    # What it holds now, and the most it held so far, in bytes.
    memory: int = 0
    memory_most: int = 0
    # The last thing it said, where it raised.
    error: str = ""


@dataclass(frozen=True)
class LiveAgreement:
    """Whether replicas hold the same parameters, as far as they were compared."""

    # Steps, of the module with the most of them.
    compared: int = 0
    parted: bool = False
    # Where they parted first, and the ranks that stand apart.
    step: int | None = None
    stage: str = ""
    odd: tuple[int, ...] = ()


@dataclass(frozen=True)
class LiveStepTime:
    """How fast the ranks train together, by their latest steps."""

    step_us: int
    # Step times of one rank, the latest last.
    course_us: tuple[int, ...]
    # Shares of the step: communication that nothing hides, and waiting for ranks that come late.
    exposed: float
    late: float
    # The rank that waits least, which the others wait for.
    latest_rank: int


@dataclass(frozen=True)
class LiveState:
    """A run at one moment: its latest start."""

    name: str
    world_size: int = 0
    # Which start of the job it is, from 0.
    attempt: int = 0
    ranks: tuple[LiveRank, ...] = ()
    agreement: LiveAgreement = field(default_factory=LiveAgreement)
    pace: LiveStepTime | None = None
    finding: Finding | None = None
    # Since the job began, and since any rank last got further.
    seconds: float = 0.0
    quiet_seconds: float = 0.0
    # That is longer than steps take here.
    stalled: bool = False
    # The folder says that the command has ended; or its launcher has vanished without a word.
    ended: bool = False
    abandoned: bool = False

    @property
    def steps(self) -> int:
        """Of the rank that is furthest."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def fewest_steps(self) -> int:
        return min((rank.steps for rank in self.ranks), default=0)

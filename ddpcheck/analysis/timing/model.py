"""Time tables: phases of a step by rank, stragglers and scaling. Times are microseconds per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spent:
    """One phase of a rank's steps."""

    median_us: int
    p90_us: int
    mean_us: int
    # Share of the rank's mean step.
    share: float


@dataclass(frozen=True)
class RankTime:
    """One rank's steps."""

    rank: int
    step: Spent
    # data, forward, backward, optimizer, other, wait
    parts: Mapping[str, Spent]
    # Steps in which it arrived last: its wait was the shortest.
    last_arrivals: int
    # Time of ddpcheck itself, in addition to the step.
    watching_us: int
    # Time in which the training thread was runnable without a CPU; null: unknown.
    queued_us: int | None = None
    # Page faults of the training thread, and its time in the kernel; null: unknown.
    faults: int | None = None
    kernel_us: int | None = None
    # DDP's own averages: forward, backward, communication, overlap.
    ddp_us: Mapping[str, int] = field(default_factory=dict)
    # Step time over the job: the maximum of each interval of steps.
    course_us: tuple[int, ...] = ()


@dataclass(frozen=True)
class Straggler:
    """Ranks that the others wait for."""

    ranks: tuple[int, ...]
    # How much longer the others wait per step.
    cost_us: int
    share: float
    # The phase that takes longer: on these ranks and on the others.
    part: str
    own_us: int
    others_us: int
    excess_us: Mapping[str, int]
    steps_late: int
    # Excess over the others: time without a CPU, page faults, time in the kernel.
    queued_us: int | None = None
    faults: int | None = None
    kernel_us: int | None = None


@dataclass(frozen=True)
class Scaling:
    """Scaling efficiency and losses, as shares of the mean step over all ranks."""

    compute: float
    data: float
    other: float
    exposed_communication: float
    waiting_for_stragglers: float
    # Relative to a single rank with the same work: per rank, and in total.
    efficiency: float
    speed_up: float


@dataclass(frozen=True)
class CrossCheck:
    """Waiting time from two independent sources; means over ranks."""

    wait_us: int
    # DDP's own, in the first iterations and at every hundredth: communication that did not overlap with the backward.
    ddp_wait_us: int


@dataclass(frozen=True)
class Refaults:
    """Memory that is returned to the system and faulted in again in every step, on the most affected rank."""

    rank: int
    # Page faults per step, and share of the step that the training thread spends in the kernel.
    faults: int
    share: float


@dataclass(frozen=True)
class TimeTable:
    """Ranks that synchronize with each other, and the steps that were compared."""

    group: tuple[int, ...]
    steps: int
    first_step: int
    last_step: int
    # Stride of the steps that were kept.
    every: int
    # Steps with a pause, which were excluded.
    pauses: int
    # "host", or "device" if the phases were measured on a GPU.
    clock: str
    step_us: int
    ranks: tuple[RankTime, ...]
    scaling: Scaling
    straggler: Straggler | None = None
    # None if DDP's statistics of a rank are missing.
    cross_check: CrossCheck | None = None
    # None if they take little time, or with device times.
    refaults: Refaults | None = None

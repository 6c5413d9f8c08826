"""Where the time of a step went, as reports show it. All times are microseconds of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spent:
    """One part of a rank's steps."""

    median_us: int
    p90_us: int
    mean_us: int
    # Of the rank's step, by the means.
    share: float


@dataclass(frozen=True)
class RankTime:
    """One rank's steps."""

    rank: int
    step: Spent
    # data, forward, backward, optimizer, other, wait
    parts: Mapping[str, Spent]
    # Steps at which it was the last to arrive, by its wait being the shortest.
    last_arrivals: int
    # What ddpcheck itself took, on top of the step.
    watching_us: int
    # The training thread in line for a processor; null: the system does not tell.
    queued_us: int | None = None
    # Page faults of the training thread, and its time in the kernel; null: the system does not tell.
    faults: int | None = None
    kernel_us: int | None = None
    # DDP's own averages: forward, backward, communication, overlap.
    ddp_us: Mapping[str, int] = field(default_factory=dict)
    # Its step over the job: as many stretches of the table's steps, of each the longest.
    course_us: tuple[int, ...] = ()


@dataclass(frozen=True)
class Straggler:
    """Ranks that the others wait for."""

    ranks: tuple[int, ...]
    # How much longer the others wait than they do, a step.
    cost_us: int
    share: float
    # The part of their work that takes longer, there and elsewhere.
    part: str
    own_us: int
    others_us: int
    excess_us: Mapping[str, int]
    steps_late: int
    # More than the others: in line for a processor, page faults, time in the kernel.
    queued_us: int | None = None
    faults: int | None = None
    kernel_us: int | None = None


@dataclass(frozen=True)
class Scaling:
    """What of a step is gained and lost by having several ranks; shares of the mean step over all ranks."""

    compute: float
    data: float
    other: float
    exposed_communication: float
    waiting_for_stragglers: float
    # Of one rank alone with the same work, and what all ranks together come to.
    efficiency: float
    speed_up: float


@dataclass(frozen=True)
class CrossCheck:
    """Waiting by two clocks that know nothing of each other; means over the ranks."""

    wait_us: int
    # DDP's own, in the first iterations and at every hundredth: communication that did not overlap with the backward.
    ddp_wait_us: int


@dataclass(frozen=True)
class Refaults:
    """Memory that is given back and taken again in each step, on the rank that loses most to it."""

    rank: int
    # Page faults a step, and what of the step its training thread spends in the kernel.
    faults: int
    share: float


@dataclass(frozen=True)
class TimeTable:
    """Ranks that synchronise with each other, and the steps that were compared."""

    group: tuple[int, ...]
    steps: int
    first_step: int
    last_step: int
    # Only every so-manieth step was kept of a long run.
    every: int
    # Steps with a pause in them, which were left out.
    pauses: int
    # "host", or "device" where the parts are those of a GPU.
    clock: str
    step_us: int
    ranks: tuple[RankTime, ...]
    scaling: Scaling
    straggler: Straggler | None = None
    # None where DDP's clocks of some rank are missing.
    cross_check: CrossCheck | None = None
    # None where they take little, and by the clock of a device.
    refaults: Refaults | None = None

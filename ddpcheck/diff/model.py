"""The result of comparing two runs, as reports and `ddpcheck diff --json` show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddpcheck.diff.speed import SpeedFigure

# Version of what `ddpcheck diff --json` prints.
# 1 (2026-11): first version.
DIFF_SCHEMA = 1


class DiffVerdict(str, Enum):
    """Whether the runs are equal as far as both were recorded. Values are stored."""

    AGREE = "agree"
    DIVERGED = "parted"


class Method(str, Enum):
    """How two runs were compared: bitwise, or within rounding error."""

    EXACT = "exact"
    ROUNDING = "rounding"


class DiffSource(str, Enum):
    """The stages of a step, in order of execution."""

    INIT = "init.after"
    FORWARDS = "forwards"
    DATA = "data"
    RANDOM = "random"
    BUFFERS = "buffers"
    REWRITTEN = "rewritten"
    LOCAL = "local"
    REDUCED = "reduced"
    APPLIED = "applied"
    STATE = "optimizer.state"
    HYPER = "hyperparameters"
    PARAMS = "params"


# Steps after the first divergence that are reported as well.
FOLLOWING_STEPS = 2
ORDER = {where: number for number, where in enumerate(DiffSource)}


@dataclass(frozen=True)
class RunInfo:
    """One of the two runs."""

    path: str
    attempt: int
    world_size: int
    steps: int
    torch: str
    device: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """One value in both runs; `rank` is None if it is not a single rank's."""

    what: str
    a: Any
    b: Any
    rank: int | None = None


@dataclass(frozen=True)
class FirstDifference:
    """A stage of a step in which the runs differ."""

    # -1: at wrapping, before the first step.
    step: int
    stage: DiffSource
    module: int
    # The first differing tensor in model order; for gradients within rounding, the one that differs most.
    parameter: str | None
    # How many differ, and of how many.
    differing: int
    tensors: int
    ranks: tuple[int, ...]
    message: str
    values: tuple[Value, ...] = ()
    # B / A, if all differing gradients differ by one factor.
    ratio: float | None = None
    # True if the difference appeared in one step, False if it grew; None: not known.
    sudden: bool | None = None
    # The last earlier step in which this stage was compared and equal; None: there is none.
    agreed_until: int | None = None


@dataclass(frozen=True)
class DifferenceGrowth:
    """Relative difference of the reduced gradients of one step, and its tolerance."""

    step: int
    module: int
    relative: float
    tolerance: float

    @property
    def beyond(self) -> bool:
        """True if rounding does not explain the difference."""
        return self.relative > self.tolerance


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    verdict: DiffVerdict
    method: Method
    a: RunInfo
    b: RunInfo
    first: FirstDifference | None
    # Probable cause of the first divergence.
    cause: str
    # Later divergences, up to two steps after the first.
    then: tuple[FirstDifference, ...]
    # Differences in software, machine, command line and settings.
    suspects: tuple[Value, ...]
    # Number of comparisons by stage.
    compared: dict[str, int] = field(default_factory=dict)
    growth: tuple[DifferenceGrowth, ...] = ()
    # Speed and memory; nothing of it decides the verdict.
    speed: tuple[SpeedFigure, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = DIFF_SCHEMA

"""What comes of comparing two runs: plain data, ready to be shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Version of what `ddpcheck diff --json` prints.
# 1 (2026-11): first version.
DIFF_SCHEMA = 1


class DiffVerdict(str, Enum):
    """Whether the runs are the same, as far as both were recorded."""

    AGREE = "agree"
    PARTED = "parted"


class Method(str, Enum):
    """How two runs were compared: to the bit, or within what rounding explains."""

    EXACT = "exact"
    ROUNDING = "rounding"


class DiffSource(str, Enum):
    """The stages of a step, in the order in which one leads to the next."""

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


# Steps after the first parting that are told of as well.
AFTERMATH = 2
ORDER = {where: number for number, where in enumerate(DiffSource)}


@dataclass(frozen=True)
class RunSide:
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
    """One thing on both sides; `rank` is None where it is no single rank's."""

    what: str
    a: Any
    b: Any
    rank: int | None = None


@dataclass(frozen=True)
class FirstDifference:
    """A moment at which the runs are not the same."""

    # -1: at wrapping, before the first step.
    step: int
    stage: DiffSource
    module: int
    # The first that differs, in the order of the model; for gradients within rounding, the one furthest off.
    parameter: str | None
    # How many differ, and of how many.
    differing: int
    tensors: int
    ranks: tuple[int, ...]
    message: str
    values: tuple[Value, ...] = ()
    # B over A, where all gradients that are off are off by one factor.
    ratio: float | None = None
    # Whether the difference came from one step to the next, and did not grow; None: not known.
    sudden: bool | None = None
    # The last earlier step at which this stage was compared and found equal; None: there is none.
    agreed_until: int | None = None


@dataclass(frozen=True)
class DifferenceGrowth:
    """How far apart the reduced gradients of one step are, over their size, and how far they may be."""

    step: int
    module: int
    relative: float
    tolerance: float

    @property
    def beyond(self) -> bool:
        """Whether rounding is no excuse any more."""
        return self.relative > self.tolerance


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. Made once; reports show it and compute nothing."""

    verdict: DiffVerdict
    method: Method
    a: RunSide
    b: RunSide
    first: FirstDifference | None
    # What the first parting says of its cause.
    cause: str
    # Other partings, in order, up to two steps later.
    then: tuple[FirstDifference, ...]
    # What is not the same about the two runs from the outside.
    suspects: tuple[Value, ...]
    # How often each stage was compared.
    compared: dict[str, int] = field(default_factory=dict)
    growth: tuple[DifferenceGrowth, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = DIFF_SCHEMA

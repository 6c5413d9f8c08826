"""Figures over the steps of a job, as reports that draw them receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class AgreementInterval:
    """Steps in a row at which the same ranks agreed; step -1 is the wrapping."""

    first: int
    last: int
    # How many of these steps were compared: not all of them with --every.
    compared: int
    # Ranks that did not hold what the majority held; without a majority, all that were compared.
    odd: tuple[int, ...] = ()
    # Ranks of the group that said nothing.
    absent: tuple[int, ...] = ()
    majority: bool = True


@dataclass(frozen=True)
class AgreementHistory:
    """One module's parameters after wrapping and after each step."""

    module: str
    name: str
    ranks: tuple[int, ...]
    stretches: tuple[AgreementInterval, ...]
    # Whether there were more stretches than are kept.
    cut: bool = False
    # The lines of the user's that wrapped it, and that took its first step, as file:line.
    wrapped_at: str = ""
    stepped_at: str = ""


@dataclass(frozen=True)
class GradientHistory:
    """Norms of one module's gradients, to within a fifth; each point is the largest of `every` steps."""

    module: str
    name: str
    every: int
    steps: tuple[int, ...]
    # Before the reduction, by rank; null where nothing was sketched, or values were not finite.
    local: Mapping[str, tuple[float | None, ...]]
    # After it.
    reduced: tuple[float | None, ...]
    # Distance of the reduced gradients from the mean, over what rounding explains: above 1 it is wrong.
    off_mean: tuple[float | None, ...]


@dataclass(frozen=True)
class EnvironmentValue:
    """One value, and the ranks that have it."""

    value: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EnvironmentRow:
    """One thing about the ranks' surroundings; one value where they are alike."""

    name: str
    values: tuple[EnvironmentValue, ...]


class SeriesKind(str, Enum):
    """What a line shows. Times are microseconds, sizes bytes, rates bytes a second, shares percent."""

    # 1 where all ranks, or this rank and the majority, hold the same parameters.
    AGREEMENT = "agreement"
    DIFFERING = "differing"
    NORM_BEFORE = "norm before"
    NORM_AFTER = "norm after"
    # The mean check's error over what rounding explains.
    OFF_MEAN = "off mean"
    LOSS = "loss"
    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    WAIT = "wait"
    # ddpcheck's own work, on top of the step.
    WATCHING = "watching"
    # Of `wait`: what the last rank to come still has of it, and what the others have beyond that.
    EXPOSED = "exposed"
    FOR_OTHERS = "for others"
    MEMORY = "memory"
    MEMORY_HIGH = "memory high"
    # Of the profiled steps.
    OVERLAP = "overlap"
    PROFILED_EXPOSED = "profiled exposed"
    PROFILED_TRANSFER = "profiled transfer"
    PROFILED_WAIT = "profiled wait"
    # Of a node.
    CPU = "cpu"
    NETWORK_SENT = "network sent"
    NETWORK_RECEIVED = "network received"
    LOOPBACK_SENT = "loopback sent"
    LOOPBACK_RECEIVED = "loopback received"
    INFINIBAND_SENT = "infiniband sent"
    INFINIBAND_RECEIVED = "infiniband received"
    # Of a GPU.
    NVLINK_SENT = "nvlink sent"
    NVLINK_RECEIVED = "nvlink received"
    PCIE_SENT = "pcie sent"
    PCIE_RECEIVED = "pcie received"
    GPU_BUSY = "gpu busy"
    GPU_MEMORY = "gpu memory"


@dataclass(frozen=True)
class NamedSeries:
    """One figure over the steps; steps in order, of the same length as the values."""

    figure: SeriesKind
    steps: Sequence[int]
    values: Sequence[float]
    # Which module, optimizer, host or GPU, where there are several.
    of: str = ""


@dataclass(frozen=True)
class Histogram:
    """Values of one gradient that was saved whole: how many lie between one edge and the next."""

    step: int
    parameter: str
    # Before the reduction, or after it.
    reduced: bool
    # The rank it is of; None: the same on all ranks to the bit.
    rank: int | None
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    of: str = ""


@dataclass(frozen=True)
class LinkMatrix:
    """What links between nodes, or between ranks of a node, gave: bytes a second from the row's to the column's."""

    title: str
    names: tuple[str, ...]
    rates: tuple[tuple[float | None, ...], ...]
    # What a sound link gives: known where a slow one was told apart, else the median.
    usual: float


def _no_clock(step: float) -> float:
    return 0.0


@dataclass(frozen=True)
class RunTimeSeries:
    """The last attempt's."""

    job: tuple[NamedSeries, ...] = ()
    # Each rank's; of very many, those that findings name.
    ranks: Mapping[int, tuple[NamedSeries, ...]] = field(default_factory=dict)
    # Of very many ranks: the least, the median and the most of all.
    spread: Mapping[str, tuple[NamedSeries, ...]] = field(default_factory=dict)
    histograms: tuple[Histogram, ...] = ()
    links: tuple[LinkMatrix, ...] = ()
    # When a step was over, in seconds since 1970; 0.0: not known.
    when: Callable[[float], float] = _no_clock

"""Series over the steps of a job, as reports receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class AgreementInterval:
    """Consecutive steps with the same outliers; step -1 is the wrapping."""

    first: int
    last: int
    # Number of compared steps: fewer with --every.
    compared: int
    # Ranks that differ from the majority; without a majority, all compared ranks.
    odd: tuple[int, ...] = ()
    # Ranks of the group that did not report.
    absent: tuple[int, ...] = ()
    majority: bool = True


@dataclass(frozen=True)
class AgreementHistory:
    """One module's parameters after wrapping and after each step."""

    module: str
    name: str
    ranks: tuple[int, ...]
    stretches: tuple[AgreementInterval, ...]
    # Whether there were more intervals than are kept.
    cut: bool = False
    # Call sites of the wrapping and of the first step, as file:line.
    wrapped_at: str = ""
    stepped_at: str = ""


@dataclass(frozen=True)
class GradientHistory:
    """Norms of one module's gradients, to within a fifth; each point is the maximum over `every` steps."""

    module: str
    name: str
    every: int
    steps: tuple[int, ...]
    # Before the reduction, by rank; null if not sketched or not finite.
    local: Mapping[str, tuple[float | None, ...]]
    # After it.
    reduced: tuple[float | None, ...]
    # AllReduce error / rounding bound: above 1 the result is wrong.
    off_mean: tuple[float | None, ...]


@dataclass(frozen=True)
class EnvironmentValue:
    """One value, and the ranks that have it."""

    value: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EnvironmentRow:
    """One property of the environment; one value if all ranks have the same."""

    name: str
    values: tuple[EnvironmentValue, ...]


class SeriesKind(str, Enum):
    """What a series shows. Times in microseconds, sizes in bytes, rates in bytes per second, shares in percent."""

    # 1 if all ranks, or this rank and the majority, have the same parameters.
    AGREEMENT = "agreement"
    DIFFERING = "differing"
    NORM_BEFORE = "norm before"
    NORM_AFTER = "norm after"
    # AllReduce error / rounding bound.
    OFF_MEAN = "off mean"
    LOSS = "loss"
    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    WAIT = "wait"
    # ddpcheck's own work, in addition to the step.
    WATCHING = "watching"
    # Parts of `wait`: the wait of the rank that arrived last, and what the others wait beyond that.
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
    """Values by step; steps are increasing."""

    figure: SeriesKind
    steps: Sequence[int]
    values: Sequence[float]
    # Module, optimizer, host or GPU, if there are several.
    of: str = ""


@dataclass(frozen=True)
class Histogram:
    """Histogram of one saved gradient: counts between edges."""

    step: int
    parameter: str
    # Before the reduction, or after it.
    reduced: bool
    # The rank; None: bitwise equal on all ranks.
    rank: int | None
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    of: str = ""


@dataclass(frozen=True)
class LinkMatrix:
    """Throughput between nodes, or ranks of a node, in bytes per second from row to column."""

    title: str
    names: tuple[str, ...]
    rates: tuple[tuple[float | None, ...], ...]
    # Throughput of a healthy link: of the links that are not slow, or the median.
    usual: float


def _no_clock(step: float) -> float:
    return 0.0


@dataclass(frozen=True)
class RunTimeSeries:
    """All series of the last attempt."""

    job: tuple[NamedSeries, ...] = ()
    # By rank; with very many ranks, those named by findings.
    ranks: Mapping[int, tuple[NamedSeries, ...]] = field(default_factory=dict)
    # With very many ranks: minimum, median and maximum over all.
    spread: Mapping[str, tuple[NamedSeries, ...]] = field(default_factory=dict)
    histograms: tuple[Histogram, ...] = ()
    links: tuple[LinkMatrix, ...] = ()
    # End time of a step in seconds since 1970; 0.0: unknown.
    when: Callable[[float], float] = _no_clock

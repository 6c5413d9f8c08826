"""Builds all series over the steps from one attempt, its hardware samples and its profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.allreduce.saved_gradients import Saved, saved_files
from ddpcheck.analysis.evidence import CapturedTensors
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.hardware.collector import StepTimeline
from ddpcheck.analysis.hardware.samples import MOST_NODES_WITH_SERIES, NodeSamples
from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.analysis.timeseries.lines import (
    Shortest,
    gradient_history,
    job_agreement,
    job_gradients,
    job_loss,
    job_overlap,
    job_time,
    rank_agreement,
    rank_gradients,
    rank_loss,
    rank_memory,
    rank_overlap,
    rank_time,
    shortest_waits,
)
from ddpcheck.analysis.timeseries.model import (
    GradientHistory,
    Histogram,
    NamedSeries,
    RunTimeSeries,
    SeriesKind,
)
from ddpcheck.analysis.timeseries.nodes import job_nodes, link_matrices, rank_gpus
from ddpcheck.analysis.timeseries.series import points_per_series

if TYPE_CHECKING:
    import numpy

BINS = 30
# Maximum number of histograms.
MOST_HISTOGRAMS = 4000
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
ByRank = Mapping[int, list[CapturedTensors]]


def gradient_histograms(folder: Path, ranks: Sequence[int]) -> tuple[Histogram, ...]:
    """Of the last attempt with saved gradients: local gradients of each rank, and reduced gradients once."""
    attempts = saved_files(folder)
    if not attempts:
        return ()
    latest = attempts[-1]
    modules = {saved.module for saved in latest}
    histograms: list[Histogram] = []
    for step in _some([saved.step for saved in latest], _size(latest, ranks)):
        for module in sorted(modules):
            by_rank: dict[int, list[CapturedTensors]] = {}
            for saved in latest:
                if (saved.step, saved.module) == (step, module):
                    by_rank.setdefault(saved.rank, []).append(saved.tensors)
            of = f"module {module}" if len(modules) > 1 else ""
            histograms += _of_step(step, by_rank, frozenset(ranks), of)
    return tuple(histograms[:MOST_HISTOGRAMS])


def _size(saved: Sequence[Saved], ranks: Sequence[int]) -> int:
    """Approximate number of histograms of one step."""
    names = {key for one in saved[:64] for key, _, _ in one.tensors.entries()}
    return max(1, len(names) * (len(ranks) + 1) // 2)


def _some(steps: Sequence[int], size: int) -> list[int]:
    distinct = sorted(set(steps))
    most = max(1, MOST_HISTOGRAMS // size)
    return distinct[:: -(-len(distinct) // most)]


def _of_step(step: int, by_rank: ByRank, shown: frozenset[int], of: str) -> Iterator[Histogram]:
    kinds = {key: dtype for files in by_rank.values() for file in files for key, dtype, _ in file.entries()}
    for key, dtype in kinds.items():
        part, _, name = key.partition("/")
        if part not in ("local", "reduced"):
            continue
        raw = {rank: b"".join(file.read(key) for file in files) for rank, files in by_rank.items()}
        raw = {rank: data for rank, data in raw.items() if data}
        if part == "reduced" and len(set(raw.values())) == 1:
            by_rank_data: dict[int | None, bytes] = {None: next(iter(raw.values()))}
        else:
            by_rank_data = {rank: data for rank, data in raw.items() if rank in shown}
        for rank, data in by_rank_data.items():
            numbers = _numbers(data, dtype)
            if numbers is not None and numbers.size:
                edges, counts = _counted(numbers)
                yield Histogram(step, name, part == "reduced", rank, edges, counts, of)


def _numbers(data: bytes, dtype: str) -> numpy.ndarray | None:
    """The finite values; None for other dtypes or truncated data."""
    import numpy

    if dtype == "BF16" and len(data) % 2 == 0:
        wide = numpy.frombuffer(data, "<u2").astype("<u4") << 16
        values = wide.view("<f4").astype("<f8")
    elif dtype in _NUMPY and len(data) % numpy.dtype(_NUMPY[dtype]).itemsize == 0:
        values = numpy.frombuffer(data, _NUMPY[dtype]).astype("<f8")
    else:
        return None
    finite: numpy.ndarray = values[numpy.isfinite(values)]
    return finite


def _counted(numbers: numpy.ndarray) -> tuple[tuple[float, ...], tuple[int, ...]]:
    import numpy

    low, high = float(numbers.min()), float(numbers.max())
    if not high > low:
        # All values are equal: one narrow bin.
        width = max(abs(low), 1.0) * math.ulp(1.0)
        return (low - width, low + width), (int(numbers.size),)
    counts, edges = numpy.histogram(numbers, bins=BINS, range=(low, high))
    return tuple(map(float, edges)), tuple(map(int, counts))


LEAST, MEDIAN, MOST = "least", "median", "most"
Key = tuple[SeriesKind, str]
Pick = Callable[[list[float]], float]


def spread_of(ranks: Iterable[tuple[NamedSeries, ...]]) -> Mapping[str, tuple[NamedSeries, ...]]:
    """Minimum, median and maximum over ranks, for each kind of series."""
    gathered: dict[Key, dict[int, list[float]]] = {}
    for lines in ranks:
        for each in lines:
            by_step = gathered.setdefault((each.figure, each.of), {})
            for step, value in zip(each.steps, each.values, strict=True):
                by_step.setdefault(step, []).append(value)
    picks: dict[str, Pick] = {LEAST: min, MEDIAN: median, MOST: max}
    return {
        name: tuple(_combined(key, gathered[key], pick) for key in gathered) for name, pick in picks.items()
    }


def _combined(key: Key, by_step: Mapping[int, list[float]], pick: Pick) -> NamedSeries:
    steps = sorted(by_step)
    return NamedSeries(key[0], steps, [pick(by_step[step]) for step in steps], key[1])


# With more ranks than this, only ranks named by findings are shown.
MOST_RANKS = 64
MOST_NAMED = 16


class TimeSeriesBuilder:
    """Builds the series of one attempt."""

    def __init__(self, attempt: Attempt, nodes: Sequence[NodeSamples], overlap: Overlap | None) -> None:
        self._attempt = attempt
        self._nodes = nodes[:MOST_NODES_WITH_SERIES]
        self._overlap = overlap
        self._gradients: tuple[GradientHistory, ...] = gradient_history(attempt)
        self._shortest: Shortest = shortest_waits(attempt)
        self._pace = _first_pace(attempt)

    def job(self, max_points: int) -> tuple[NamedSeries, ...]:
        nodes = job_nodes(self._nodes, self._pace, max_points) if self._pace else ()
        return (
            *job_agreement(self._attempt, max_points),
            *job_gradients(self._gradients, max_points),
            *job_loss(self._attempt, max_points),
            *job_time(self._shortest, max_points),
            *job_overlap(self._overlap),
            *nodes,
        )

    def rank(self, rank: int, max_points: int) -> tuple[NamedSeries, ...]:
        clock = self._attempt.step_times.get(rank)
        return (
            *rank_agreement(self._attempt, rank, max_points),
            *rank_gradients(self._gradients, rank, max_points),
            *rank_loss(self._attempt, rank, max_points),
            *(rank_time(clock, rank, self._shortest, max_points) if clock else ()),
            *rank_memory(self._attempt, rank, max_points),
            *rank_overlap(self._overlap, rank),
            *self._gpus(rank, max_points),
        )

    def when(self, step: float) -> float:
        return self._pace.when(step) if self._pace else 0.0

    def _gpus(self, rank: int, max_points: int) -> tuple[NamedSeries, ...]:
        host, timeline = self._attempt.ranks[rank].header.host, self._attempt.step_timelines.of(rank)
        node = next((node for node in self._nodes if node.host == host), None)
        return rank_gpus(node, rank, timeline, max_points) if node and timeline else ()


def loss_timeseries(attempt: Attempt) -> RunTimeSeries:
    """The loss of the job alone, which takes little time with any number of ranks."""
    return RunTimeSeries(job=job_loss(attempt, points_per_series(1)))


def build_timeseries(
    attempt: Attempt,
    nodes: Sequence[NodeSamples],
    overlap: Overlap | None,
    findings: Iterable[Finding],
    links: NodeLinks,
    folder: Path,
) -> RunTimeSeries:
    """All series over the steps; empty if nothing was recorded."""
    builder = TimeSeriesBuilder(attempt, nodes, overlap)
    everyone = sorted(attempt.ranks)
    shown = everyone if len(everyone) <= MOST_RANKS else _named(findings, everyone)
    max_points = points_per_series(len(everyone))
    lines = {rank: builder.rank(rank, max_points) for rank in everyone}
    return RunTimeSeries(
        job=builder.job(points_per_series(1)),
        ranks={rank: lines[rank] for rank in shown},
        spread=spread_of(lines.values()) if len(shown) < len(everyone) else {},
        histograms=gradient_histograms(folder, shown),
        links=link_matrices(links, folder),
        when=builder.when,
    )


def _named(findings: Iterable[Finding], everyone: Sequence[int]) -> list[int]:
    """The first ranks of each finding; without findings, the first rank."""
    named = dict.fromkeys(rank for finding in findings for rank in finding.ranks[:MOST_NAMED])
    known = [rank for rank in named if rank in set(everyone)][:MOST_NAMED]
    return sorted(known or everyone[:1])


def _first_pace(attempt: Attempt) -> StepTimeline | None:
    """The timeline of the first rank: all ranks step together."""
    return next((line for line in map(attempt.step_timelines.of, sorted(attempt.ranks)) if line), None)

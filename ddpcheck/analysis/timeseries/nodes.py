"""Series of nodes and GPUs over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddpcheck.analysis.hardware.samples import NodeSamples, rates_of
from ddpcheck.analysis.hardware.statistics import GpuSample, NodeSample
from ddpcheck.analysis.hardware.step_times import StepTimeline
from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import named_series, present

Totals = Callable[[NodeSample], tuple[int, ...]]


def job_nodes(
    nodes: Sequence[NodeSamples], timeline: StepTimeline, max_points: int
) -> tuple[NamedSeries, ...]:
    """CPU and network of every shown node."""
    series: list[NamedSeries | None] = []
    for node in nodes:
        steps, samples = by_step(node.fine.samples, timeline)
        series.append(
            named_series(SeriesKind.CPU, steps, [sample.cpu for sample in samples], max_points, node.host)
        )
        for received, sent, totals in (
            (SeriesKind.NETWORK_RECEIVED, SeriesKind.NETWORK_SENT, partial(_interfaces, False)),
            (SeriesKind.LOOPBACK_RECEIVED, SeriesKind.LOOPBACK_SENT, partial(_interfaces, True)),
            (SeriesKind.INFINIBAND_RECEIVED, SeriesKind.INFINIBAND_SENT, _ports),
        ):
            series += _rates(steps, samples, totals, received, sent, max_points, node.host)
    return present(series)


def rank_gpus(
    node: NodeSamples, rank: int, timeline: StepTimeline, max_points: int
) -> tuple[NamedSeries, ...]:
    """GPUs that the rank's process uses."""
    indices = sorted(node.statistics.ranks.get(str(rank), {}).get("gpus", ()))
    steps, samples = by_step(node.fine.samples, timeline)
    series: list[NamedSeries | None] = []
    for index in indices:
        if any(index >= len(sample.gpus) for sample in samples):
            continue
        of = f"GPU {node.gpu_index(index)}" if len(indices) > 1 else ""
        gpus = [sample.gpus[index] for sample in samples]
        series.append(named_series(SeriesKind.GPU_BUSY, steps, [gpu.busy for gpu in gpus], max_points, of))
        series.append(
            named_series(SeriesKind.GPU_MEMORY, steps, [gpu.memory for gpu in gpus], max_points, of)
        )
        nvlink = partial(_counted, index, "nvlink")
        series += _rates(
            steps, samples, nvlink, SeriesKind.NVLINK_RECEIVED, SeriesKind.NVLINK_SENT, max_points, of
        )
        series += _pcie(steps, samples, gpus, index, max_points, of)
    return present(series)


def by_step(samples: Sequence[NodeSample], timeline: StepTimeline) -> tuple[list[int], list[NodeSample]]:
    """The last sample of each step; totals accumulate, so nothing is lost. Earlier samples are dropped."""
    latest: dict[int, NodeSample] = {}
    for sample in samples:
        if timeline.began <= sample.time <= timeline.ended:
            latest[int(timeline.at(sample.time))] = sample
    return list(latest), list(latest.values())


def _rates(
    steps: Sequence[int],
    samples: Sequence[NodeSample],
    totals: Totals,
    received: SeriesKind,
    sent: SeriesKind,
    max_points: int,
    of: str,
) -> list[NamedSeries | None]:
    """Bytes per second since the previous sample; empty if the node has no such counters."""
    if not any(totals(sample) for sample in samples):
        return []
    rates = rates_of(samples, totals)[1:]
    return [
        named_series(received, steps[1:], [rate[0] for rate in rates], max_points, of),
        named_series(sent, steps[1:], [rate[1] for rate in rates], max_points, of),
    ]


def _pcie(
    steps: Sequence[int],
    samples: Sequence[NodeSample],
    gpus: Sequence[GpuSample],
    index: int,
    max_points: int,
    of: str,
) -> list[NamedSeries | None]:
    """From byte counters; if the device has none, from its sampled rates."""
    if any(gpu.pcie for gpu in gpus):
        totals = partial(_counted, index, "pcie")
        return _rates(steps, samples, totals, SeriesKind.PCIE_RECEIVED, SeriesKind.PCIE_SENT, max_points, of)
    pairs: list[Any] = [gpu.pcie_rate or (None, None) for gpu in gpus]
    return [
        named_series(SeriesKind.PCIE_SENT, steps, [pair[0] for pair in pairs], max_points, of),
        named_series(SeriesKind.PCIE_RECEIVED, steps, [pair[1] for pair in pairs], max_points, of),
    ]


def _interfaces(loopback: bool, sample: NodeSample) -> tuple[int, ...]:
    return _summed([row for name, row in sample.interfaces.items() if (name == "lo") is loopback])


def _ports(sample: NodeSample) -> tuple[int, ...]:
    return _summed(list(sample.infiniband.values()))


def _summed(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(row[0] for row in rows), sum(row[1] for row in rows)) if rows else ()


def _counted(index: int, kind: str, sample: NodeSample) -> tuple[int, ...]:
    """Received and sent; a GPU's counters are in the opposite order."""
    pair = getattr(sample.gpus[index], kind)
    return (pair[1], pair[0]) if pair else ()

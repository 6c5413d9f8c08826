"""Series of nodes and GPUs over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ddpcheck.analysis.hardware.collector import StepTimeline
from ddpcheck.analysis.hardware.samples import NodeSamples, rates_of
from ddpcheck.analysis.hardware.statistics import GpuSample, NodeSample
from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.network.slow_link import carrying
from ddpcheck.analysis.timeseries.model import LinkMatrix, NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import named_series, present
from ddpcheck.links.model import BETWEEN, WITHIN, LinksReport, MeasuredLink

FILE = "links.json"


def link_matrices(observed: NodeLinks, folder: Path) -> tuple[LinkMatrix, ...]:
    """`observed`: links of the job's own traffic; `folder` may contain links.json."""
    return (*_observed(observed), *_measured_in(folder))


def _observed(observed: NodeLinks) -> tuple[LinkMatrix, ...]:
    """With several interfaces between two nodes, the slowest one is used, as by the job."""
    rates: dict[tuple[str, str], float] = {}
    for link in carrying(observed.links):
        rates[link.ends] = min(rates.get(link.ends, link.bandwidth), link.bandwidth)
    if not rates:
        return ()
    usual = None if observed.slow is None else observed.slow.usual
    return (matrix_of("Links between nodes, throughput while busy", rates, list(observed.ranks), usual),)


def _measured_in(folder: Path) -> tuple[LinkMatrix, ...]:
    """Empty if nothing was measured, or the file cannot be read."""
    try:
        report = LinksReport.from_json((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    hosts = {rank: node.host for node in report.nodes for rank in node.ranks}
    matrices = []
    for group in (BETWEEN, WITHIN):
        links = [link for link in report.links if link.group == group]
        if links:
            matrices.append(_measured(links, group, hosts))
    return tuple(matrices)


def _measured(links: Sequence[MeasuredLink], group: str, hosts: Mapping[int, str]) -> LinkMatrix:
    units = sorted({link.source for link in links} | {link.target for link in links})
    # Between nodes the first rank of each node measures.
    names = {unit: hosts.get(unit, str(unit)) if group == BETWEEN else f"rank {unit}" for unit in units}
    rates = {(names[link.source], names[link.target]): link.bandwidth for link in links}
    return matrix_of(f"Links {group}, measured by ddpcheck links", rates, [names[unit] for unit in units])


def matrix_of(
    title: str,
    rates: Mapping[tuple[str, str], float],
    names: Sequence[str],
    usual: float | None = None,
) -> LinkMatrix:
    """`rates`: bytes per second by source and target. `usual`: of healthy links if known, else the median."""
    return LinkMatrix(
        title=title,
        names=tuple(names),
        rates=tuple(tuple(rates.get((source, target)) for target in names) for source in names),
        usual=median(rates.values()) if usual is None else usual,
    )


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

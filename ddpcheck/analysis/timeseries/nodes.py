"""What nodes and GPUs did, laid over the steps that were taken meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddpcheck.analysis.hardware.samples import NodeSamples, rates_of
from ddpcheck.analysis.hardware.statistics import GpuSample, NodeSample
from ddpcheck.analysis.hardware.step_times import StepTimeline
from ddpcheck.analysis.timeseries.model import NamedSeries, SeriesKind
from ddpcheck.analysis.timeseries.series import line, there

Totals = Callable[[NodeSample], tuple[int, ...]]


def job_nodes(nodes: Sequence[NodeSamples], pace: StepTimeline, room: int) -> tuple[NamedSeries, ...]:
    """Of every node that is drawn: processors and the network."""
    found: list[NamedSeries | None] = []
    for node in nodes:
        steps, samples = by_step(node.closely.samples, pace)
        found.append(line(SeriesKind.CPU, steps, [sample.cpu for sample in samples], room, node.host))
        for received, sent, totals in (
            (SeriesKind.NETWORK_RECEIVED, SeriesKind.NETWORK_SENT, partial(_interfaces, False)),
            (SeriesKind.LOOPBACK_RECEIVED, SeriesKind.LOOPBACK_SENT, partial(_interfaces, True)),
            (SeriesKind.INFINIBAND_RECEIVED, SeriesKind.INFINIBAND_SENT, _ports),
        ):
            found += _rates(steps, samples, totals, received, sent, room, node.host)
    return there(found)


def rank_gpus(node: NodeSamples, rank: int, pace: StepTimeline, room: int) -> tuple[NamedSeries, ...]:
    """Of the GPUs that the rank's process was seen on."""
    places = sorted(node.tally.ranks.get(str(rank), {}).get("gpus", ()))
    steps, samples = by_step(node.closely.samples, pace)
    found: list[NamedSeries | None] = []
    for place in places:
        if any(place >= len(sample.gpus) for sample in samples):
            continue
        of = f"GPU {node.gpu_index(place)}" if len(places) > 1 else ""
        gpus = [sample.gpus[place] for sample in samples]
        found.append(line(SeriesKind.GPU_BUSY, steps, [gpu.busy for gpu in gpus], room, of))
        found.append(line(SeriesKind.GPU_MEMORY, steps, [gpu.memory for gpu in gpus], room, of))
        nvlink = partial(_counted, place, "nvlink")
        found += _rates(steps, samples, nvlink, SeriesKind.NVLINK_RECEIVED, SeriesKind.NVLINK_SENT, room, of)
        found += _pcie(steps, samples, gpus, place, room, of)
    return there(found)


def by_step(samples: Sequence[NodeSample], pace: StepTimeline) -> tuple[list[int], list[NodeSample]]:
    """Of samples in one step the last: totals count on, so nothing is lost. What came before the first step goes."""
    latest: dict[int, NodeSample] = {}
    for sample in samples:
        if pace.began <= sample.time <= pace.ended:
            latest[int(pace.at(sample.time))] = sample
    return list(latest), list(latest.values())


def _rates(
    steps: Sequence[int],
    samples: Sequence[NodeSample],
    totals: Totals,
    received: SeriesKind,
    sent: SeriesKind,
    room: int,
    of: str,
) -> list[NamedSeries | None]:
    """Bytes a second since the sample before; nothing where the node has no such counters."""
    if not any(totals(sample) for sample in samples):
        return []
    rates = rates_of(samples, totals)[1:]
    return [
        line(received, steps[1:], [rate[0] for rate in rates], room, of),
        line(sent, steps[1:], [rate[1] for rate in rates], room, of),
    ]


def _pcie(
    steps: Sequence[int],
    samples: Sequence[NodeSample],
    gpus: Sequence[GpuSample],
    place: int,
    room: int,
    of: str,
) -> list[NamedSeries | None]:
    """From counters of bytes; where the device has none, what it says of a few milliseconds."""
    if any(gpu.pcie for gpu in gpus):
        totals = partial(_counted, place, "pcie")
        return _rates(steps, samples, totals, SeriesKind.PCIE_RECEIVED, SeriesKind.PCIE_SENT, room, of)
    pairs: list[Any] = [gpu.pcie_rate or (None, None) for gpu in gpus]
    return [
        line(SeriesKind.PCIE_SENT, steps, [pair[0] for pair in pairs], room, of),
        line(SeriesKind.PCIE_RECEIVED, steps, [pair[1] for pair in pairs], room, of),
    ]


def _interfaces(loopback: bool, sample: NodeSample) -> tuple[int, ...]:
    return _summed([row for name, row in sample.interfaces.items() if (name == "lo") is loopback])


def _ports(sample: NodeSample) -> tuple[int, ...]:
    return _summed(list(sample.infiniband.values()))


def _summed(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(row[0] for row in rows), sum(row[1] for row in rows)) if rows else ()


def _counted(place: int, kind: str, sample: NodeSample) -> tuple[int, ...]:
    """Received and sent; a GPU's own counters stand the other way round."""
    pair = getattr(sample.gpus[place], kind)
    return (pair[1], pair[0]) if pair else ()

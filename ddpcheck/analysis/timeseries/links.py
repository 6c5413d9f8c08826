"""Link matrices: throughput of the job's own traffic, and bandwidth measured by `ddpcheck links`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.network.slow_link import carrying
from ddpcheck.analysis.timeseries.model import LinkMatrix
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

"""Links as a table from everyone to everyone: what the job itself met, and what `ddpcheck links` measured beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.network.slow_link import carrying
from ddpcheck.analysis.timeseries.model import LinkMatrix
from ddpcheck.links.model import BETWEEN, WITHIN, LinksReport, MeasuredLink

FILE = "links.json"


def link_matrices(met: NodeLinks, folder: Path) -> tuple[LinkMatrix, ...]:
    """`met`: what the job's own traffic met; `folder` may hold what was measured without a job."""
    return (*_met(met), *_measured_in(folder))


def _met(met: NodeLinks) -> tuple[LinkMatrix, ...]:
    """Of several cards between two nodes the slowest counts, as it does for the job."""
    rates: dict[tuple[str, str], float] = {}
    for link in carrying(met.links):
        rates[link.ends] = min(rates.get(link.ends, link.bandwidth), link.bandwidth)
    if not rates:
        return ()
    usual = None if met.slow is None else met.slow.usual
    return (matrix_of("Links between nodes, while the job asked them", rates, list(met.ranks), usual),)


def _measured_in(folder: Path) -> tuple[LinkMatrix, ...]:
    """None where nothing was measured, or the file cannot be read."""
    try:
        report = LinksReport.from_json((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    hosts = {rank: node.host for node in report.nodes for rank in node.ranks}
    found = []
    for group in (BETWEEN, WITHIN):
        links = [link for link in report.links if link.group == group]
        if links:
            found.append(_measured(links, group, hosts))
    return tuple(found)


def _measured(links: Sequence[MeasuredLink], group: str, hosts: Mapping[int, str]) -> LinkMatrix:
    units = sorted({link.source for link in links} | {link.target for link in links})
    # Between nodes the first rank of each measures for it.
    names = {unit: hosts.get(unit, str(unit)) if group == BETWEEN else f"rank {unit}" for unit in units}
    rates = {(names[link.source], names[link.target]): link.bandwidth for link in links}
    return matrix_of(f"Links {group}, as measured by ddpcheck links", rates, [names[unit] for unit in units])


def matrix_of(
    title: str,
    rates: Mapping[tuple[str, str], float],
    names: Sequence[str],
    usual: float | None = None,
) -> LinkMatrix:
    """`rates`: bytes a second, by source and target. `usual`: of sound links, where it is known; else the median."""
    return LinkMatrix(
        title=title,
        names=tuple(names),
        rates=tuple(tuple(rates.get((source, target)) for target in names) for source in names),
        usual=median(rates.values()) if usual is None else usual,
    )

"""Links as a table from everyone to everyone: what `ddpcheck links` measured, where its file lies in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from ddpcheck.analysis.course.result import LinkMatrix
from ddpcheck.links.result import BETWEEN, WITHIN, Link, LinksReport

FILE = "links.json"


def link_matrices(folder: Path) -> tuple[LinkMatrix, ...]:
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


def _measured(links: Sequence[Link], group: str, hosts: Mapping[int, str]) -> LinkMatrix:
    units = sorted({link.source for link in links} | {link.target for link in links})
    # Between nodes the first rank of each measures for it.
    names = {unit: hosts.get(unit, str(unit)) if group == BETWEEN else f"rank {unit}" for unit in units}
    rates = {(names[link.source], names[link.target]): link.bandwidth for link in links}
    return matrix_of(f"Links {group}, as measured by ddpcheck links", rates, [names[unit] for unit in units])


def matrix_of(title: str, rates: Mapping[tuple[str, str], float], names: Sequence[str]) -> LinkMatrix:
    """`rates`: bytes a second, by source and target."""
    return LinkMatrix(
        title=title,
        names=tuple(names),
        rates=tuple(tuple(rates.get((source, target)) for target in names) for source in names),
        usual=median(rates.values()),
    )

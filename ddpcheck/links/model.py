"""The result of `ddpcheck links`: its JSON, and its text with slow links, heat maps and the AllReduce sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

# Version of links.json. 1 (2026-11): first version.
LINKS_SCHEMA = 1

BETWEEN = "between nodes"
WITHIN = "within a node"


@dataclass(frozen=True)
class MeasuredLink:
    """One direction from one rank to another."""

    source: int
    target: int
    # Class of links it is compared with: `BETWEEN` or `WITHIN`.
    group: str
    # Seconds one way, and bytes per second.
    latency: float
    bandwidth: float
    # Spread of repeated measurements, relative to the bandwidth.
    spread: float
    # Size in bytes and number of the messages that the bandwidth was measured with.
    size: int
    messages: int


@dataclass(frozen=True)
class AllReduce:
    """An AllReduce of `size` bytes over all ranks; bandwidths in bytes per second."""

    size: int
    seconds: float
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Node:
    """A host and its ranks; the first one measures links between nodes."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkExplanation:
    """The common cause of a set of slow links."""

    kind: str
    group: str
    # Hosts, or ranks within a node, that it is about; for islands, those of the smaller one.
    names: tuple[str, ...]
    # Slowdown relative to the other links of the class, and posterior probability.
    factor: float
    confidence: float
    # Bytes per second: of the slow links, and of the others.
    bandwidth: float
    usual: float
    links: int

    def sentence(self) -> str:
        what = _WORDS[self.kind].format(*self.names, all=", ".join(self.names))
        return (
            f"{what}: {self.factor:.1f} times slower than other links {self.group} "
            f"({megabits(self.bandwidth)} vs. {megabits(self.usual)}), confidence {self.confidence:.0%}"
        )


_WORDS = {
    "slow node": "{0} is slow in both directions, to all others",
    "slow sending": "{0} sends slowly to all others",
    "slow receiving": "{0} receives slowly from all others",
    "slow link": "the link between {0} and {1} is slow in both directions",
    "slow direction": "the link from {0} to {1} is slow in this direction",
    "islands": "two groups of nodes have slow links between them; one group is {all}",
    "slow inside": "links inside {0} are slow",
}


@dataclass(frozen=True)
class LinksReport:
    """The complete measurement."""

    backend: str
    nodes: tuple[Node, ...]
    links: tuple[MeasuredLink, ...]
    allreduce: tuple[AllReduce, ...]
    explanations: tuple[LinkExplanation, ...]
    tolerance: float
    seconds: float
    # Number of measurements: 2 if the first was uneven, 3 if a cause was found.
    looks: int = 1
    slow: bool = field(default=False)
    schema: int = LINKS_SCHEMA

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    def to_json(self) -> str:
        raw = {"schema": self.schema, "slow": self.slow, "world_size": self.world_size, **asdict(self)}
        return json.dumps(raw, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LinksReport:
        raw = json.loads(text)
        return cls(
            backend=raw["backend"],
            nodes=tuple(Node(one["host"], tuple(one["ranks"])) for one in raw["nodes"]),
            links=tuple(MeasuredLink(**_known(MeasuredLink, one)) for one in raw["links"]),
            allreduce=tuple(AllReduce(**_known(AllReduce, one)) for one in raw["allreduce"]),
            explanations=tuple(
                LinkExplanation(**{**_known(LinkExplanation, one), "names": tuple(one["names"])})
                for one in raw["explanations"]
            ),
            tolerance=raw["tolerance"],
            seconds=raw["seconds"],
            looks=raw["looks"],
            slow=raw["slow"],
        )


def megabits(bytes_per_second: float) -> str:
    """In bits per second: `940 Mbit/s`, `12.5 Gbit/s`."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}


# Shades, each with the largest slowdown that it represents.
_SHADES = ((" ", 1.2), ("░", 1.5), ("▒", 2.5), ("▓", 5.0), ("█", float("inf")))
_ASCII = str.maketrans("░▒▓█", ".:*#")
_MAX_NUMERIC_UNITS = 8
_NAME_WIDTH = 14


def render_links(report: LinksReport, *, ascii_only: bool = False) -> str:
    """The report in lines of at most 80 columns, for up to 64 nodes."""
    hosts = {rank: node.host for node in report.nodes for rank in node.ranks}
    blocks = [_verdict(report)]
    for group in (BETWEEN, WITHIN):
        links = [link for link in report.links if link.group == group]
        if links:
            blocks.append(_map(links, group, hosts))
    if report.allreduce:
        blocks.append(_sweep(report))
    text = "\n\n".join(blocks) + "\n"
    return text.translate(_ASCII) if ascii_only else text


def _verdict(report: LinksReport) -> str:
    size = f"{len(report.nodes)} nodes, {report.world_size} ranks, {report.backend}, {report.seconds:.0f} s"
    if not report.explanations:
        return f"No link is slower than {report.tolerance:g} times its class ({size})"
    return "\n".join([f"Slow links ({size})", *(f"  {one.sentence()}" for one in report.explanations)])


def _map(links: Sequence[MeasuredLink], group: str, hosts: dict[int, str]) -> str:
    units = sorted({link.source for link in links} | {link.target for link in links})
    usual = median(link.bandwidth for link in links)
    cells = {(link.source, link.target): link.bandwidth for link in links}
    names = {unit: (hosts[unit] if group == BETWEEN else f"rank {unit}")[:_NAME_WIDTH] for unit in units}
    latencies = sorted(link.latency for link in links)
    head = (
        f"Links {group}: median {megabits(usual)}, latency {median(latencies) * 1e6:.0f} us "
        f"({latencies[0] * 1e6:.0f} to {latencies[-1] * 1e6:.0f})"
    )
    if len(units) > _MAX_NUMERIC_UNITS:
        rows = [
            f"  {names[a]:<{_NAME_WIDTH}} {''.join(_shade(cells.get((a, b)), usual) for b in units)}"
            for a in units
        ]
        return "\n".join([head, "  from row to column; darker is slower", *rows])
    unit, scale = ("Gbit/s", 1e9) if usual * 8 >= 1e9 else ("Mbit/s", 1e6)
    title = f"  {f'{unit} from/to':<{_NAME_WIDTH}}" + "".join(f"{names[b][-7:]:>8}" for b in units)
    rows = [
        f"  {names[a]:<{_NAME_WIDTH}}" + "".join(_figure(cells.get((a, b)), usual, scale) for b in units)
        for a in units
    ]
    return "\n".join([head, title, *rows])


def _figure(rate: float | None, usual: float, scale: float) -> str:
    return f"{'-':>8}" if rate is None else f"{_shade(rate, usual)}{f'{rate * 8 / scale:.3g}':>6}".rjust(8)


def _shade(rate: float | None, usual: float) -> str:
    if rate is None:
        return "-"
    return next(shade for shade, most in _SHADES if usual / rate <= most)


def _sweep(report: LinksReport) -> str:
    rows = [
        f"  {_bytes(one.size):>8} {one.seconds * 1e3:>10.3f} {one.algbw / 1e9:>10.3f} {one.busbw / 1e9:>10.3f}"
        for one in report.allreduce
    ]
    title = f"  {'bytes':>8} {'ms':>10} {'algbw GB/s':>10} {'busbw GB/s':>10}"
    return "\n".join([f"AllReduce over {report.world_size} ranks", title, *rows])


def _bytes(size: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size / unit:g}{letter}"
    return str(size)

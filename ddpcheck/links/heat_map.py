"""The result as text: slow links, heat maps, and the AllReduce sweep."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddpcheck.links.model import BETWEEN, WITHIN, LinksReport, MeasuredLink, megabits

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
